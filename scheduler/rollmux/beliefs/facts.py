"""The planner's knowledge of one job: declarations, observations and its SLO account."""

from collections.abc import Sequence
from itertools import count
from typing import Final

import msgspec

from scheduler.model import Completion, JobSpec, PhaseKind
from scheduler.rollmux.beliefs.durations import Belief, PhaseEstimate, learned
from scheduler.rollmux.beliefs.slo import SloProgress
from scheduler.rollmux.beliefs.tail import ROOM_RATIO, UNDIVIDED, TailShape, best_shape

_RENEWED_AT: Final = (1, 2, 4, 8, 16, 32)
"""Observations after which a belief is renewed because its doubt has shrunk."""
_STEP_RATIO: Final = 0.03
"""A mean that moved this far renews the belief; less is not worth forecasting everything again."""
_TAIL_STEP_RATIO: Final = 0.02
"""A bulk's share of the rollout's time that moved this far renews the belief too."""
_versions = count(1)


class JobFacts(msgspec.Struct, kw_only=True, dict=True):
    """Stored in the control's state file, except `version`, which is unique within one process."""

    spec: JobSpec
    rollout: PhaseEstimate
    training: PhaseEstimate
    account: SloProgress
    tail: TailShape = UNDIVIDED
    """Learned; as long as nothing is known a rollout is taken to fill its nodes to its end."""
    sync: PhaseEstimate | None = None
    """Duration of the weight sync after a training; None if neither declared nor seen."""
    moving: bool = False
    """Whether it is on its way: resident on its nodes, and pinned to its next ones."""
    moved_s: float | None = None
    """Start time of the job's last move; None before its first move."""
    open_s: float = 0.0
    """Solo seconds of the present iteration that have ended; lost with the iteration."""
    next_phase: PhaseKind = PhaseKind.ROLLOUT
    """The phase after the last one that ended; it may run already."""
    seen_s: float = 0.0
    """End of its last phase, or of its cold start."""
    in_force: Belief | None = None
    """Belief in force until observations outdate it; `belief` renews it."""

    def __post_init__(self) -> None:
        self.version = 0
        """Version of the belief, unique over all jobs: a verdict about a version never expires."""

    @classmethod
    def of(
        cls, job: JobSpec, *, cold_start_s: float, began_s: float | None = None, now: float
    ) -> "JobFacts":
        """The job's facts. The SLO counts from `began_s` on; None: from now on."""
        rollout, training, *sync = job.phases
        return cls(
            spec=job,
            rollout=PhaseEstimate(rollout.max_s),
            training=PhaseEstimate(training.max_s),
            account=SloProgress(
                slo=job.slo,
                began_s=now if began_s is None else began_s,
                solo_s=cold_start_s,
            ),
            sync=PhaseEstimate(sync[0].max_s) if sync else None,
            seen_s=now + cold_start_s,
        )

    @property
    def rollout_nodes(self) -> int:
        return self.spec.phases[0].nodes

    @property
    def training_nodes(self) -> int:
        return self.spec.phases[1].nodes

    @property
    def mature(self) -> bool:
        """Seen often enough that its own durations outweigh its declaration."""
        return self.training.count >= 4

    @property
    def drifts(self) -> bool:
        """Whether the mean of one of its phases is known to drift."""
        return self.rollout.drift_s != 0.0 or self.training.drift_s != 0.0

    def recall(self, *, accelerators: int) -> None:
        """Learns what the job declares of earlier runs; it earns no credit.

        A rollout node has `accelerators` accelerators.
        """
        rollout = self.spec.phases[0]
        self.learn_tail(rollout.curve, accelerators=accelerators * rollout.nodes)
        for phase in self.spec.phases:
            self.estimate(phase.kind).recall(phase)

    def observe(self, kind: PhaseKind, solo_s: float, *, measured: bool = True) -> None:
        """Records the end of a phase. An unmeasured one teaches nothing and earns its mean at
        most."""
        if kind is PhaseKind.SYNC and self.sync is None:
            self.sync = PhaseEstimate(solo_s)
            self.in_force = None
        estimate = self.estimate(kind)
        solo_s = estimate.believable(solo_s)
        if measured:
            estimate.observe(solo_s)
        else:
            solo_s = min(solo_s, estimate.mean_s)
        self.account.solo_s += solo_s
        self.next_phase = self._after(kind)
        began_s = 0.0 if kind is PhaseKind.ROLLOUT else self.open_s
        self.open_s = 0.0 if self.next_phase is PhaseKind.ROLLOUT else began_s + solo_s
        if self.in_force is not None and self._outdated(self.in_force):
            self.in_force = None

    def observe_cut(self, kind: PhaseKind, at_least_s: float) -> None:
        """A phase that was ended before its end teaches where it was longer than believed."""
        estimate = self.estimate(kind)
        if at_least_s > estimate.mean_s:
            estimate.observe(estimate.believable(at_least_s))
            self.in_force = None

    @property
    def divisible(self) -> bool:
        return self.spec.phases[0].divisible

    def learn_tail(
        self, curve: Sequence[Completion], *, accelerators: int, room_ratio: float = ROOM_RATIO
    ) -> None:
        """Learns the tail shape from the completion curve, on `accelerators` accelerators in all,
        of which a tail needs `room_ratio` times its share of the responses."""
        shape = UNDIVIDED
        if self.divisible:
            shape = best_shape(curve, accelerators=accelerators, room_ratio=room_ratio)
        moved = abs(shape.bulk_ratio - self.tail.bulk_ratio)
        if shape.share != self.tail.share or moved >= _TAIL_STEP_RATIO:
            self.tail = shape
            self.in_force = None

    def lose_iteration(self) -> None:
        """Restarts at the last checkpoint: work since then earns no credit."""
        self.account.take_back(self.open_s)
        self.open_s = 0.0
        self.next_phase = PhaseKind.ROLLOUT

    def belief(self) -> Belief:
        if self.in_force is None:
            self.in_force = learned(self.rollout, self.training, self.sync)
            self.version = next(_versions)
        return self.in_force

    def believe(self, belief: Belief) -> None:
        """Takes a belief from elsewhere, until observations outdate it."""
        self.in_force = belief
        self.version = next(_versions)

    def slo_ahead(self, now: float, *, delay_s: float = 0.0) -> float:
        """The largest slow-down ahead that its SLO allows, after `delay_s` more of delay."""
        return self.account.slo_ahead(
            now + delay_s,
            iteration_s=self.belief().iteration_s,
            under_way_s=self._under_way_s(now),
            drifts=self.drifts,
        )

    def settled_credit_s(self, now: float) -> float:
        """Credit in s if the present phase ends as expected; below 0 the promise is broken."""
        return self.account.credit_s(now) + self._under_way_s(now)

    def settled_slowdown(self, now: float) -> float:
        """Slow-down that is above the SLO exactly where `settled_credit_s` is below 0."""
        passed_s = now - self.account.began_s - self._under_way_s(now)
        return self.account.slowdown(passed_s)

    def estimate(self, kind: PhaseKind) -> PhaseEstimate:
        """Raises KeyError for a weight sync that was neither declared nor seen."""
        if kind is PhaseKind.SYNC:
            if self.sync is None:
                raise KeyError(kind)
            return self.sync
        return self.rollout if kind is PhaseKind.ROLLOUT else self.training

    def _after(self, kind: PhaseKind) -> PhaseKind:
        if kind is PhaseKind.ROLLOUT:
            return PhaseKind.TRAINING
        synced = kind is PhaseKind.SYNC or self.sync is None
        return PhaseKind.ROLLOUT if synced else PhaseKind.SYNC

    def _under_way_s(self, now: float) -> float:
        belief = self.belief()
        phase_s = {
            PhaseKind.ROLLOUT: belief.rollout_s,
            PhaseKind.TRAINING: belief.training_s,
            PhaseKind.SYNC: belief.sync_s,
        }[self.next_phase]
        return min(max(0.0, now - self.seen_s), phase_s)

    def _outdated(self, belief: Belief) -> bool:
        if self.training.count in _RENEWED_AT:
            return True
        return (
            abs(self.rollout.mean_s / belief.rollout_s - 1.0) > _STEP_RATIO
            or abs(self.training.mean_s / belief.training_s - 1.0) > _STEP_RATIO
            or (
                self.sync is not None
                and abs(self.sync.mean_s - belief.sync_s) > _STEP_RATIO * belief.iteration_s
            )
        )
