"""The plan of given jobs: placed one by one, moved where that spares nodes, then explained."""

from collections import Counter
from dataclasses import replace
from typing import Final

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.model import Pool
from scheduler.rollmux.cluster.job_limits import GB
from scheduler.rollmux.forecast.forecast import Roster, group_load
from scheduler.rollmux.forecast.timeline import meta_iteration
from scheduler.rollmux.plan.document import (
    GroupLoadRow,
    PlanDocument,
    PlannedGroup,
    PlannedJob,
    Resident,
    TimelineBar,
    Unplaced,
)
from scheduler.rollmux.plan.forecasts import alternatives, slo_forecasts
from scheduler.rollmux.plan.jobs_file import PlannedJobSettings, PlanSettings
from scheduler.rollmux.planner.group_table import GroupState
from scheduler.rollmux.planner.planner import GroupPlanner
from scheduler.rollmux.planner.relocation import MovePrices

FREE_MOVES: Final = MovePrices(
    move_s=0.0, least_saving_per_move=0.01, quiet_s=0.0, surprise_iterations=0.0
)
_SEARCHES_MAX: Final = 40


class KnownJobsPlanner(GroupPlanner):
    """The production planner, with jobs that are known beforehand and moves that cost nothing.

    No job runs yet: a placed job may move for free, so savings are searched for until none is left.
    """

    def __init__(self, settings: PlanSettings) -> None:
        control = settings.as_control
        config = replace(control.planner, prices=FREE_MOVES)
        super().__init__(control.judge, control.types, config, settings.supply)
        self.rules = control.rules
        """Assumptions of its forecasts about permits."""
        self.reasons: dict[JobId, str] = {}

    def place(self, job: PlannedJobSettings) -> None:
        """Places a job. Raises Exhausted if the supply of nodes does not suffice."""
        placed = self.place_job(job.spec, now=0.0)
        self.reasons[placed.placement.job] = placed.reason

    def spare_nodes(self) -> None:
        """Searches for moves that spare nodes, until none is found."""
        # No job is resident anywhere yet, so only the nodes used afterwards count.
        there, self.table.supply = self.table.supply, {}
        for _ in range(_SEARCHES_MAX):
            moves = self.regroup.improve(now=0.0)
            if moves and any(self._used(pool) > count for pool, count in there.items()):
                self.relocation.take_back(moves)
                break
            for move in moves:
                self.reasons[move.job] = "hosted together these jobs need fewer nodes"
                self.complete_move(move.job, now=0.0)
            if not moves and not self.regroup.unseen(now=0.0):
                break
        self.table.supply = there

    def _used(self, pool: Pool) -> int:
        """Number of nodes in use once every job has moved."""
        sides = (
            {node for one in group.pinned.values() for node in dict(one.by_pool)[pool]}
            for group in self.table.groups.values()
        )
        return sum(map(len, sides))


def draft(settings: PlanSettings) -> PlanDocument:
    planner = KnownJobsPlanner(settings)
    unplaced: list[Unplaced] = []
    for job in settings.jobs:
        try:
            planner.place(job)
        except Exhausted as error:
            unplaced.append(Unplaced(job=JobId(job.id), reason=str(error)))
    planner.spare_nodes()
    groups = [group for group in planner.table.groups.values() if group.pinned]
    names = _names(planner, groups)
    placed = (planner.facts[job] for group in groups for job in group.pinned)
    return PlanDocument(
        risk=settings.risk,
        price_per_hour=planner.table.committed_per_hour,
        dedicated_per_hour=sum(
            planner.table.price_of(one.rollout_nodes, one.training_nodes) for one in placed
        ),
        nodes={
            kind.type: sum(len(dict(group.by_pool)[pool]) for group in groups)
            for pool, kind in planner.table.types.items()
        },
        groups=tuple(
            _group(planner, group, GroupId(f"group-{number}"), names)
            for number, group in enumerate(groups, start=1)
        ),
        unplaced=tuple(unplaced),
        slo_counts_queueing=settings.slo_counts_queueing,
    )


def _names(planner: KnownJobsPlanner, groups: list[GroupState]) -> dict[NodeId, NodeId]:
    """Nodes numbered from 1: the planner's own numbers also count rejected candidates."""
    counted: Counter[Pool] = Counter()
    names: dict[NodeId, NodeId] = {}
    for group in groups:
        for pool, nodes in group.by_pool:
            for node in nodes:
                counted[pool] += 1
                names[node] = NodeId(f"{planner.table.types[pool].type}-{counted[pool]}")
    return names


def _group(
    planner: KnownJobsPlanner,
    group: GroupState,
    name: GroupId,
    names: dict[NodeId, NodeId],
) -> PlannedGroup:
    kept = slo_forecasts(planner, group)
    occupants = planner.packer.occupants(group)
    cycle_s, busiest_s = group_load(occupants)
    picture = meta_iteration(Roster.of(occupants), rules=planner.rules)
    own, jobs = (*group.rollout, *group.training), tuple(group.pinned)
    return PlannedGroup(
        group=name,
        price_per_hour=planner.table.group_price_per_hour(group),
        nodes=_residents(planner, group, names),
        jobs=tuple(
            PlannedJob(
                job=one.job,
                rollout_nodes=tuple(names[node] for node in group.pinned[one.job].rollout_nodes),
                training_nodes=tuple(names[node] for node in group.pinned[one.job].training_nodes),
                reason=planner.reasons[one.job],
                sync_s=planner.facts[one.job].belief().sync_s,
                slo_forecast=one,
                alternatives=alternatives(planner, one.job),
            )
            for one in kept
        ),
        bound_by=min(kept, key=lambda one: one.slack).job,
        meta_iteration_s=picture.length_s,
        bars=tuple(
            TimelineBar(
                node=names[node],
                job=jobs[one.job],
                phase=one.phase,
                start_s=one.start_s,
                end_s=one.end_s,
                tail=one.tail,
            )
            for one in picture.stretches
            for bit, node in enumerate(own)
            if one.nodes >> bit & 1
        ),
        load=GroupLoadRow(cycle_s=cycle_s, busiest_s=busiest_s, share=busiest_s / cycle_s),
    )


def _residents(
    planner: KnownJobsPlanner, group: GroupState, names: dict[NodeId, NodeId]
) -> tuple[Resident, ...]:
    ledger, types = planner.table.planned, planner.table.types
    residents = []
    for pool, nodes in group.by_pool:
        for node in nodes:
            used_bytes = types[pool].host_bytes - ledger.free_bytes(node, pool)
            residents.append(
                Resident(
                    node=names[node],
                    pool=pool,
                    jobs=ledger.jobs_on(node),
                    used_gb=used_bytes / GB,
                    host_gb=types[pool].host_bytes / GB,
                )
            )
    return tuple(residents)
