"""Short names for jobs' events to the permit policy, and for its effects."""

from typing import Any

from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.permits.events import (
    Beat,
    Enter,
    GrantPermit,
    Leave,
    PermitEffect,
    Recall,
    Register,
    TimeElapsed,
    Unloaded,
    Withdraw,
)
from scheduler.rollmux.permits.permits import PermitPolicy
from scheduler.rollmux.permits.terms import JobTerms, PermitsConfig, PhaseTerms

ROLLOUT, TRAINING = PhaseKind.ROLLOUT, PhaseKind.TRAINING
CONFIG = PermitsConfig(lease_s=10.0, patience_s=0.5, warn_s=5.0, grace_s=3.0)


def nodes(words: str) -> tuple[NodeId, ...]:
    return tuple(NodeId(word) for word in words.split())


def terms(job: str, *, rollout: str = "r0", training: str = "t0", **rollout_terms: Any) -> JobTerms:
    """Nodes are given as words."""
    return JobTerms(
        job=JobId(job),
        phases=(
            PhaseTerms(kind=ROLLOUT, nodes=nodes(rollout), **rollout_terms),
            PhaseTerms(kind=TRAINING, nodes=nodes(training)),
        ),
    )


class Group:
    """Jobs with one policy, at times that the test sets."""

    def __init__(self, *placed: JobTerms, config: PermitsConfig = CONFIG) -> None:
        self.policy = PermitPolicy(config)
        self.now = 0.0
        for each in placed:
            self.policy.observe(Register(terms=each), now=0.0)

    def ask(self, job: str, kind: PhaseKind = ROLLOUT, *, holder: str = "") -> Any:
        event = Enter(job=JobId(job), kind=kind, holder=holder or f"{job}.1")
        return self._observe(event)

    def withdraw(self, job: str) -> Any:
        return self._observe(Withdraw(job=JobId(job), holder=f"{job}.1"))

    def beat(self, job: str, ratio: float = 0.0, *, epoch: int | None = None) -> Any:
        event = Beat(job=JobId(job), epoch=Epoch(epoch or self.epoch(job)), complete_ratio=ratio)
        return self._observe(event)

    def narrowed(self, job: str) -> Any:
        return self._observe(Beat(job=JobId(job), epoch=self.epoch(job), narrowed=True))

    def recall(self, job: str, how: Recall) -> Any:
        event = Beat(job=JobId(job), epoch=self.epoch(job), recall=how)
        return self._observe(event)

    def end(self, job: str, *, epoch: int | None = None, failed: str = "", **times_s: float) -> Any:
        at = Epoch(epoch or self.epoch(job))
        return self._observe(Leave(job=JobId(job), epoch=at, failed=failed, **times_s))

    def stopped(self, job: str) -> Any:
        """The process reports that its states are off all accelerators."""
        permit = self.policy.permit(JobId(job))
        assert permit is not None
        return self._observe(Unloaded(job=permit.job, holder=permit.loaded_by, nodes=permit.loaded))

    def pass_time(self, seconds: float) -> Any:
        self.now += seconds
        return self._observe(TimeElapsed())

    def epoch(self, job: str) -> Epoch:
        permit = self.policy.permit(JobId(job))
        assert permit is not None
        return permit.epoch

    def on(self, node: str) -> str | None:
        return self.policy.on(NodeId(node))

    def _observe(self, event: Any) -> tuple[PermitEffect, ...]:
        return self.policy.observe(event, now=self.now)


def granted(effects: tuple[PermitEffect, ...]) -> list[str]:
    return [effect.job for effect in effects if isinstance(effect, GrantPermit)]


def of(kind: type, effects: tuple[PermitEffect, ...]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]
