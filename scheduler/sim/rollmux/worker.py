"""One job's process in the simulator: it requests phases, works under permits, and reports.

It knows the truth that no policy sees: its phases' solo durations, the completion of its
responses, the cost of loading. A rollout's bulk fills the accelerators of its nodes and slows down
with the share that it holds; its tail needs a share and is slowed down only by less than that.
"""

from collections.abc import Iterator, Mapping, Sized
from enum import StrEnum
from typing import Final

from harvester.contracts.ids import Epoch, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.beliefs.tail import best_shape
from scheduler.rollmux.permits.completion import RATIOS
from scheduler.sim.rollmux.workload import ROLLOUT_ACCELERATORS, SimulatedJob, World

ROUNDING_S: Final = 1e-9
_LEAST_SHARE: Final = 1e-6


class WorkerStage(StrEnum):
    BETWEEN = "between"
    """Has no nodes: new, or it has left or lost them."""
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


class Worker:
    def __init__(self, one: SimulatedJob, world: World) -> None:
        self.one, self.job = one, one.job.job
        self.stage = WorkerStage.BETWEEN
        self.iteration = 0
        self.kinds: tuple[PhaseKind, ...] = (PhaseKind.ROLLOUT, PhaseKind.TRAINING)
        if world.sync_s:
            self.kinds = (*self.kinds, PhaseKind.SYNC)
        self.kind = PhaseKind.ROLLOUT
        self.version = 0
        """Version of its state; a scheduled moment of an earlier version is void."""
        self.epoch = Epoch(0)
        self.nodes: tuple[NodeId, ...] = ()
        self.resident: set[NodeId] = set()
        """Nodes with its state in their host memory."""
        self.loading_s = 0.0
        """Time of the present phase spent on loading and on moving its tail, in s."""
        self.leased_s = 0.0
        """Known time that leases saved in this phase, in s."""
        self.worked_s = 0.0
        self.length_s = 0.0
        self.overhead_s = 0.0
        self.share = 1.0
        """Share of its accelerators that it holds."""
        self._brought: set[PhaseKind] = set()
        """Kinds of its phases that have brought their state to some node."""
        self._sync_s = world.sync_s
        self._tail_room_ratio = world.tail_room_ratio
        self._at_s = 0.0
        self._reported = 0
        self._moved_at: float | None = None
        # Completed share at which its tail was moved.
        nodes = one.job.phases[0].nodes
        tail = best_shape(one.curve, accelerators=nodes * ROLLOUT_ACCELERATORS)
        self._mean_bulk_ratio, self._tail_share = tail.bulk_ratio, tail.share
        self._mean_milestones = tuple(_milestones(one))
        self._bulk_ratio, self._milestones = self._mean_bulk_ratio, self._mean_milestones

    @property
    def is_over(self) -> bool:
        return self.iteration == self.one.iterations

    def bring(self, nodes: tuple[NodeId, ...], world: World) -> float:
        """Seconds to load the state into these nodes' host memory; marks it as resident there.

        Rollout and training each bring their half, under their own permit.
        """
        if self.resident.issuperset(nodes):
            return 0.0
        both_s = world.move_s if self.kind in self._brought else world.cold_start_s
        self._brought.add(self.kind)
        self.resident.update(nodes)
        return both_s / 2

    def share_of(self, nodes: tuple[NodeId, ...], parts: Mapping[NodeId, Sized]) -> float:
        """Share of its rollout's accelerators in these nodes, of which `parts` are held partly."""
        if self.kind is not PhaseKind.ROLLOUT:
            return 1.0
        whole = self.one.job.phases[0].nodes * ROLLOUT_ACCELERATORS
        missing = sum(ROLLOUT_ACCELERATORS - len(part) for part in parts.values())
        return (len(nodes) * ROLLOUT_ACCELERATORS - missing) / whole

    def begin(
        self, nodes: tuple[NodeId, ...], *, loading_s: float, share: float, now: float
    ) -> None:
        self.stage = WorkerStage.RUNNING
        self.nodes, self.share = nodes, share
        self.overhead_s = self.loading_s = loading_s
        self.worked_s, self._at_s, self._reported = 0.0, now, 0
        self._moved_at = None
        self.length_s = self._sync_s
        if self.kind is PhaseKind.ROLLOUT and self.one.curve_powers:
            power = self.one.curve_powers[self.iteration]
            self._bulk_ratio = self._mean_bulk_ratio**power
            self._milestones = tuple((at**power, done) for at, done in self._mean_milestones)
        if self.kind is not PhaseKind.SYNC:
            column = 0 if self.kind is PhaseKind.ROLLOUT else 1
            self.length_s = float(self.one.lengths_s[self.iteration, column])

    def work_until(self, now: float) -> None:
        passed_s, self._at_s = now - self._at_s, now
        overhead_s = min(self.overhead_s, passed_s)
        self.overhead_s -= overhead_s
        self.worked_s += self._done_s(passed_s - overhead_s)

    def next_s(self) -> float:
        """Time of its next report or change of speed, if nothing else happens."""
        target_s = self.length_s
        if self.kind is PhaseKind.ROLLOUT:
            if self._reported < len(self._milestones):
                target_s = self._milestones[self._reported][0] * self.length_s
            if self.is_in_bulk and self._is_slower_or_faster:
                target_s = min(target_s, self._bulk_ratio * self.length_s)
        left_s = max(0.0, target_s - self.worked_s)
        return self._at_s + self.overhead_s + self._takes_s(left_s)

    def tail_moved(self) -> None:
        """The tail runs on its held share, which suffices if its open responses have room."""
        self._moved_at = self.reported_ratio

    def progress(self) -> float | None:
        """Share of its responses completed since the last report; None without news."""
        reported = self._reported
        while (
            self._reported < len(self._milestones)
            and self.worked_s >= self._milestones[self._reported][0] * self.length_s - ROUNDING_S
        ):
            self._reported += 1
        return self.reported_ratio if self._reported > reported else None

    @property
    def reported_ratio(self) -> float:
        """Completed share of its responses, as last reported."""
        return self._milestones[self._reported - 1][1] if self._reported else 0.0

    @property
    def left_s(self) -> float:
        """Remaining work of the present phase, in solo seconds."""
        return self.length_s - self.worked_s

    @property
    def is_complete(self) -> bool:
        return self.left_s <= ROUNDING_S and self.overhead_s <= ROUNDING_S

    def next_kind(self) -> None:
        """The phase after the present one; an iteration more after the last."""
        at = self.kinds.index(self.kind) + 1
        self.iteration += at == len(self.kinds)
        self.kind = self.kinds[at % len(self.kinds)]

    def lose_iteration(self) -> None:
        """Back to its last checkpoint."""
        self.kind = PhaseKind.ROLLOUT

    @property
    def is_in_bulk(self) -> bool:
        """Whether its rollout is in its bulk."""
        return self.worked_s < self._bulk_ratio * self.length_s - ROUNDING_S

    @property
    def _is_slower_or_faster(self) -> bool:
        """Whether its speed differs from that on its own nodes: it then changes when its bulk
        ends."""
        return self.share < 1.0

    def _done_s(self, works_s: float) -> float:
        """Solo seconds done in `works_s` up to now."""
        return works_s * self._speed()

    def _takes_s(self, left_s: float) -> float:
        """Seconds for `left_s` more solo seconds, without waits."""
        return left_s / self._speed()

    def _speed(self) -> float:
        """Solo seconds in a second, on the accelerators that it holds."""
        if self.kind is not PhaseKind.ROLLOUT or self.share >= 1.0:
            return 1.0
        if self._moved_at is not None:
            needed = self._tail_room_ratio * (1.0 - self._moved_at)
            return min(1.0, self.share / max(needed, _LEAST_SHARE))
        return min(1.0, self.share / (1.0 if self.is_in_bulk else self._tail_share or 1.0))


def _milestones(one: SimulatedJob) -> Iterator[tuple[float, float]]:
    """Share of a rollout's time after which each of the completed shares is reached."""
    earlier = (0.0, 0.0)
    points = [*one.curve, (1.0, 1.0)]
    for completed in RATIOS:
        while points[0][1] < completed:
            earlier = points.pop(0)
        span = points[0][1] - earlier[1]
        within = (completed - earlier[1]) / span if span > 0 else 1.0
        yield earlier[0] + within * (points[0][0] - earlier[0]), completed
