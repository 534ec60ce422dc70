"""Brings permits to the plan: the effects of one decision, in the order in which they apply."""

from typing import NamedTuple

from harvester.contracts.ids import JobId
from scheduler.rollmux.cluster.runtime_events import PlanEffect, SettleJob
from scheduler.rollmux.permits.events import DropPlace
from scheduler.rollmux.permits.job_permit import PermitStage
from scheduler.rollmux.permits.permits import PermitPolicy
from scheduler.rollmux.permits.terms import JobTerms


class Removal(NamedTuple):
    """Take the job's permit and its place in lines."""

    job: JobId
    for_good: bool
    """False: the job gets other nodes, and the knowledge about it stays."""


ClusterEffect = PlanEffect | JobTerms | Removal | DropPlace
"""Terms are to be in force from now on; a dropped place is of a job without a permit's record."""


class PermitUpdates:
    def __init__(self, permits: PermitPolicy) -> None:
        self._permits = permits
        self._effects: list[ClusterEffect] = []
        self._removed: set[JobId] = set()
        """Jobs removed from their permits in the present decision."""
        self._arrived: set[JobId] = set()
        """Jobs that the present decision has put on nodes."""
        self._touched: set[JobId] = set()

    def add(self, effect: ClusterEffect) -> None:
        self._effects.append(effect)

    def touch(self, *jobs: JobId) -> None:
        """The terms of these jobs may have changed."""
        self._touched.update(jobs)

    def arrived(self, job: JobId) -> None:
        """The job is on its nodes now: its terms are sent even if they are as before."""
        self._arrived.add(job)
        self._touched.add(job)

    def remove(self, job: JobId, *, for_good: bool = False) -> None:
        """Takes a job off its permit; `for_good` it is forgotten, with a permit or without."""
        permit = self._permits.permit(job)
        if permit is None:
            if for_good:
                self._effects.append(DropPlace(job=job, forgotten=True))
            return
        if (for_good or permit.stage is not PermitStage.APART) and job not in self._removed:
            self._removed.add(job)
            self._effects.append(Removal(job, for_good))

    def touched(self) -> list[JobId]:
        """Jobs touched since the last call."""
        touched, self._touched = sorted(self._touched), set()
        return touched

    def follow(self, target: JobTerms | None, settled: SettleJob) -> None:
        """Adds a job's present terms if they have changed; without terms, its removal."""
        job = settled.job
        permit = self._permits.permit(job)
        there = None if permit is None or job in self._removed else permit.terms
        if target is None:
            self.remove(job)
        elif target != there or job in self._arrived:
            self._effects += [target, settled]

    def take(self) -> tuple[ClusterEffect, ...]:
        """The effects of the decision; the next one begins."""
        if not self._effects and not self._arrived:
            return ()
        found = tuple(sorted(self._effects, key=self._order))
        self._effects, self._removed, self._arrived = [], set(), set()
        return found

    def _order(self, effect: ClusterEffect) -> int:
        """Applies new terms before it removes a holder, so that no freed node goes to a job that is
        on a lost one or about to leave."""
        match effect:
            case Removal(job=job):
                permit = self._permits.permit(job)
                return int(permit is not None and permit.holding)
            case JobTerms(job=job) if job in self._removed:
                return 2
        return 0
