"""Jobs with known durations under the permit policy, in virtual time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from harvester.contracts.ids import JobId
from scheduler.model import PhaseKind
from scheduler.rollmux.permits.events import (
    Enter,
    GrantPermit,
    Leave,
    PermitEffect,
    PermitEvent,
    Register,
    TimeElapsed,
)
from scheduler.rollmux.permits.permits import PermitPolicy
from scheduler.rollmux.permits.terms import JobTerms, PermitsConfig
from tests.unit.scheduler.rollmux.permits.permit_scenario import ROLLOUT, TRAINING

STEADY = PermitsConfig(lease_s=1e9, patience_s=0.5, warn_s=1e9)
"""No job is ever silent or late, so that only lines decide."""


@dataclass
class CyclingJobs:
    """Every job rolls out and trains for ever; `durations_s` are of both phases."""

    placed: tuple[JobTerms, ...]
    durations_s: Mapping[str, tuple[float, float]]
    now: float = 0.0
    grants: list[tuple[float, str, PhaseKind]] = field(default_factory=list)
    _ends: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = PermitPolicy(STEADY)
        for terms in self.placed:
            self.hear(Register(terms=terms))

    def begin(self, *jobs: str) -> None:
        for job in jobs:
            self.hear(Enter(job=JobId(job), kind=ROLLOUT, holder=job))

    def run(self, until_s: float) -> None:
        while True:
            due_s = self.policy.due_s()
            if self._ends and self._ends[0][0] <= min(due_s, until_s):
                self.now, job = heappop(self._ends)
                self._end(job)
            elif due_s <= until_s:
                self.now = due_s
                self.hear(TimeElapsed())
            else:
                self.now = until_s
                return

    def hear(self, event: PermitEvent) -> tuple[PermitEffect, ...]:
        effects = self.policy.observe(event, now=self.now)
        for effect in effects:
            if isinstance(effect, GrantPermit):
                self.grants.append((self.now, effect.job, effect.kind))
                lasts_s = self.durations_s[effect.job][effect.kind is TRAINING]
                heappush(self._ends, (self.now + lasts_s, effect.job))
        return effects

    def _end(self, job: str) -> None:
        permit = self.policy.permit(JobId(job))
        assert permit is not None
        if not permit.holding:
            return
        self.hear(Leave(job=JobId(job), epoch=permit.epoch))
        permit = self.policy.permit(JobId(job))
        assert permit is not None
        assert permit.kind is not None
        self.hear(Enter(job=JobId(job), kind=permit.kind, holder=job))
