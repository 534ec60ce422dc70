"""What the planner knows of one job: its declaration, what was observed of it, what it was promised."""

from dataclasses import dataclass

from scheduler.policy.groups.durations import Belief, PhaseEstimate, learned
from scheduler.policy.groups.slo import SloAccount
from scheduler.policy.groups.tail import TailShape
from scheduler.policy.model import Job, PhaseKind


@dataclass(slots=True)
class JobFacts:
    job: Job
    rollout: PhaseEstimate
    training: PhaseEstimate
    account: SloAccount
    tail: TailShape
    moving: bool = False
    moved_s: float = float("-inf")
    """When it last began to move."""

    @classmethod
    def of(cls, job: Job, *, cold_start_s: float, tail: TailShape, now: float) -> "JobFacts":
        rollout, training = job.phases
        return cls(
            job=job,
            rollout=PhaseEstimate(rollout.max_s),
            training=PhaseEstimate(training.max_s),
            account=SloAccount(slo=job.slowdown_slo, began_s=now, solo_s=cold_start_s),
            tail=tail,
        )

    @property
    def rollout_nodes(self) -> int:
        return self.job.phases[0].nodes

    @property
    def training_nodes(self) -> int:
        return self.job.phases[1].nodes

    @property
    def mature(self) -> bool:
        """Seen often enough that its own durations outweigh its declaration."""
        return self.training.count >= 6

    def observe(self, kind: PhaseKind, solo_s: float) -> None:
        (self.rollout if kind is PhaseKind.ROLLOUT else self.training).observe(solo_s)
        self.account.solo_s += solo_s

    def belief(self) -> Belief:
        return learned(self.rollout, self.training)
