"""Nodes, submissions and a planning service for tests; durations of jobs are in seconds."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import JobSpec, PhaseKind, PhaseSpec, Pool
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.rollmux.cluster.config import ClusterConfig, PoolNodes
from scheduler.rollmux.cluster.runtime_events import Submit
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.planning import PlanningService
from scheduler.rollmux.control.wire import (
    EnterReply,
    Granted,
)
from scheduler.rollmux.permits.events import (
    Beat,
    Enter,
    Leave,
)
from scheduler.rollmux.permits.terms import PermitsConfig
from scheduler.rollmux.planner.group_effects import AssignNodes, PlacementDecision
from scheduler.rollmux.planner.group_table import NodeType
from scheduler.rollmux.planner.packing import Opening
from tests.virtual_clock import VirtualClock

ROLLOUT, TRAINING = PhaseKind.ROLLOUT, PhaseKind.TRAINING
PERMITS = PermitsConfig(lease_s=10.0, patience_s=0.5)
HOST_BYTES = 2000


def nodes(words: str, *, type_: str, price: float, host: int = HOST_BYTES) -> PoolNodes:
    kind = NodeType(type=type_, accelerators=8, price_per_hour=price, host_bytes=host)
    return PoolNodes(type=kind, names=tuple(map(NodeId, words.split())))


def cluster(rollout: str = "r0 r1 r2", training: str = "t0 t1 t2", **more: Any) -> ClusterConfig:
    settings = {"warm_start_s": 0.5, "review_s": 60.0, **more}
    return ClusterConfig(
        rollout=nodes(rollout, type_="h20", price=15.0),
        training=nodes(training, type_="h800", price=42.0),
        **settings,
    )


def submission(
    job: str,
    rollout_s: float = 40.0,
    training_s: float = 15.0,
    *,
    slo: float = 1.6,
    host: int = 400,
    rollout_nodes: int = 1,
    measured: bool = False,
) -> JobSpec:
    """Means are 0.8 and 0.7 of the declared maxima; `measured`: they are known beforehand."""
    sides = ((ROLLOUT, rollout_s, 0.8, rollout_nodes), (TRAINING, training_s, 0.7, 1))
    return JobSpec(
        job=JobId(job),
        slo=slo,
        host_bytes=host,
        phases=tuple(
            PhaseSpec(
                kind=kind, max_s=mean_s / ratio, nodes=count, mean_s=mean_s if measured else None
            )
            for kind, mean_s, ratio, count in sides
        ),
    )


def names(words: str) -> tuple[NodeId, ...]:
    return tuple(map(NodeId, words.split()))


class Control:
    """A planning service in virtual time, spoken to as jobs do."""

    def __init__(
        self,
        config: ClusterConfig | None = None,
        *,
        clock: VirtualClock | None = None,
        state: Path | None = None,
        journal: Path | None = None,
        journal_bytes: int = 1 << 20,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.config = config or cluster()
        self.kept: dict[str, Any] = {
            "state": state,
            "journal": journal,
            "journal_bytes": journal_bytes,
        }
        self.service = PlanningService(
            ControlSettings(permits=PERMITS, cluster=self.config, **self.kept), self.clock
        )

    def restarted(self, config: ClusterConfig | None = None) -> "Control":
        self.service.close()
        return Control(config or self.config, clock=self.clock, **self.kept)

    def submit(self, *given: JobSpec) -> list[Any]:
        """Submits as the jobs' processes do."""
        return [self.service.call(Submit(spec=each, holder=f"{each.job}.1")) for each in given]

    def submit_by_hand(self, *given: JobSpec) -> list[Any]:
        return [self.service.call(Submit(spec=each)) for each in given]

    def enter(self, job: str, kind: PhaseKind = ROLLOUT) -> EnterReply:
        reply = self.service.call(Enter(job=JobId(job), kind=kind, holder=f"{job}.1"))
        assert not isinstance(reply, str)
        return reply  # type: ignore[return-value]

    def runs(self, job: str, kind: PhaseKind = ROLLOUT) -> tuple[NodeId, ...]:
        """The nodes of a permit that is there at once."""
        reply = self.enter(job, kind)
        assert isinstance(reply, Granted), reply
        return reply.nodes

    def leave(self, job: str, *, failed: str = "", loading_s: float = 0.0) -> Any:
        permit = self.service.policy.permit(JobId(job))
        assert permit is not None
        leave = Leave(job=JobId(job), epoch=permit.epoch, failed=failed, loading_s=loading_s)
        return self.service.call(leave)

    def phase(self, job: str, kind: PhaseKind, seconds: float) -> Any:
        """One phase from its beginning to its end."""
        self.runs(job, kind)
        self.pass_time(seconds, beats=(job,))
        return self.leave(job)

    def iteration(self, job: str, rollout_s: float = 40.0, training_s: float = 15.0) -> Any:
        self.phase(job, ROLLOUT, rollout_s)
        return self.phase(job, TRAINING, training_s)

    def pass_time(self, seconds: float, *, beats: Iterable[str] = ()) -> None:
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.clock.now_s = min(until_s, self.clock.now_s + 4.0)
            for job in beats:
                permit = self.service.policy.permit(JobId(job))
                if permit is not None and permit.holding:
                    self.service.call(Beat(job=JobId(job), epoch=permit.epoch))
            self.service.tick()

    def at(self, job: str) -> tuple[tuple[NodeId, ...], ...]:
        """Rollout and training nodes."""
        return self.service.cluster.machines(self.service.cluster.placements[JobId(job)].at)


def ask_to_move(policy: ClusterPolicy, job: str) -> None:
    """The planner's next review asks the job to go elsewhere, as if a promise were at risk."""
    planner, name = policy.planner, JobId(job)

    def wanted() -> list[Opening]:
        if name not in planner.table.home or planner.facts[name].moving:
            return []
        home = planner.table.groups[planner.table.home[name]]
        return planner.relocation.relocate((name,), home) or []

    _reviewed_as(policy, wanted)


def swap_reported(policy: ClusterPolicy, moves: list[Opening]) -> None:
    """The planner's next review asks for these moves, which are in its table."""
    _reviewed_as(policy, lambda: moves)


def _reviewed_as(policy: ClusterPolicy, wanted: Callable[[], list[Opening]]) -> None:
    planner = policy.planner

    def review(*, now: float) -> tuple[AssignNodes, ...]:
        del planner.review  # type: ignore[method-assign]
        planner.packer.now_s = now
        effects: list[AssignNodes] = []
        for move in wanted():
            planner.facts[move.job].moving = True
            effects.append(
                AssignNodes(
                    decision=PlacementDecision.MOVED,
                    group=move.group.group,
                    placement=move.placement,
                    reason="a test",
                )
            )
        return tuple(effects)

    planner.review = review  # type: ignore[method-assign]


def resident_bytes(policy: ClusterPolicy) -> dict[NodeId, int]:
    """Bytes in host memory, by the planner's names of nodes."""
    found: dict[NodeId, int] = {}
    for placed in policy.placements.values():
        for node in policy.residency.nodes_of(placed.job):
            found[node] = found.get(node, 0) + placed.spec.host_bytes
    return found


POOLS = (Pool.ROLLOUT, Pool.TRAINING)
