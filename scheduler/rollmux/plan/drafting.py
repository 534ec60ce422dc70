"""The plan of given jobs: placed one by one, moved where that spares nodes, then explained."""

from collections import Counter

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
from scheduler.rollmux.plan.forecasts import alternatives, promises
from scheduler.rollmux.plan.jobs_file import PlanSettings
from scheduler.rollmux.plan.known_jobs import KnownJobsPlanner
from scheduler.rollmux.planner.group_table import GroupState


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
    kept = promises(planner, group)
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
                promise=one,
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
