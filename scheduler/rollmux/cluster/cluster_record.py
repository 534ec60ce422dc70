"""The records that a restart of the cluster policy needs, and the policy rebuilt from them.

One record per job and one for the layout. The planner's caches (verdicts, time of the last look)
are not kept; the planner looks again.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import Pool
from scheduler.rollmux.beliefs.facts import JobFacts
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.rollmux.cluster.job_placement import JobPlacement
from scheduler.rollmux.cluster.measured import MeasuredSeconds
from scheduler.rollmux.planner.group_table import GroupState


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    placed: JobPlacement
    facts: JobFacts | None = None
    """The job's facts; None while it waits for a placement."""
    held: tuple[NodeId, ...] = ()
    """Nodes whose host memory has its state."""

    def shifted(self, by_s: float) -> "JobRecord":
        """A copy with times shifted by `by_s` to another clock."""
        placed, facts = self.placed, self.facts
        placed.submitted_s += by_s
        placed.placed_s = None if placed.placed_s is None else placed.placed_s + by_s
        placed.arrived_s = None if placed.arrived_s is None else placed.arrived_s + by_s
        if facts is not None:
            facts.account.began_s += by_s
            facts.moved_s = None if facts.moved_s is None else facts.moved_s + by_s
            facts.seen_s += by_s
        return self


class ClusterLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of all jobs; groups and jobs in the planner's order, which its choices
    follow."""

    groups: tuple[GroupState, ...] = ()
    machines: dict[NodeId, NodeId] = {}
    awaited: dict[NodeId, Pool] = {}
    failed: tuple[NodeId, ...] = ()
    arrivals: int = 0
    move_s: MeasuredSeconds | None = None
    warm_start_s: MeasuredSeconds | None = None
    """`move_s` and `warm_start_s` are None until the first layout is written."""


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    layout: ClusterLayout
    jobs: tuple[JobRecord, ...]


def job_record(policy: ClusterPolicy, job: JobId) -> JobRecord | None:
    """The record of a job; None if the job is gone."""
    placed = policy.placements.get(job)
    facts = policy.planner.facts.get(job)
    if placed is None:
        return None
    if facts is not None:
        # A belief formed after a restart would depend on the time of its first reader.
        facts.belief()
    return JobRecord(placed=placed, held=policy.residency.nodes_of(job), facts=facts)


def layout(policy: ClusterPolicy) -> ClusterLayout:
    return ClusterLayout(
        groups=tuple(policy.planner.table.groups.values()),
        machines=policy.fleet.machines,
        awaited=policy.fleet.awaited,
        failed=tuple(sorted(policy.fleet.failed)),
        arrivals=policy.arrivals,
        move_s=policy.load_times.move,
        warm_start_s=policy.load_times.warm_start,
    )


def snapshot(policy: ClusterPolicy) -> dict[str, Any]:
    """Snapshot of the policy as plain values."""
    records = (job_record(policy, job) for job in policy.placements)
    jobs = tuple(record for record in records if record is not None)
    found: dict[str, Any] = msgspec.to_builtins(ClusterRecord(layout=layout(policy), jobs=jobs))
    return found


def restore(policy: ClusterPolicy, memory: ClusterRecord) -> None:
    """Into a new policy.

    Raises ValueError where the records contradict each other or the nodes that there are.
    """
    records = sorted(memory.jobs, key=lambda record: record.placed.number)
    for record in records:
        _restore_job(policy, record)
    last = records[-1].placed.number if records else 0
    policy.arrivals = max(memory.layout.arrivals, last)
    where = memory.layout
    policy.load_times.restore(where.move_s, where.warm_start_s)
    policy.fleet.restore(where.machines, where.awaited, where.failed)
    _restore_groups(policy, memory.layout.groups, records)


def _restore_job(policy: ClusterPolicy, record: JobRecord) -> None:
    placed, facts = record.placed, record.facts
    policy.residency.keep(placed.job, record.held, placed.spec.host_bytes)
    policy.placements[placed.job] = placed
    if facts is not None:
        facts.believe(facts.belief())
        policy.planner.facts[placed.job] = facts


def _restore_groups(
    policy: ClusterPolicy, records: Iterable[GroupState], jobs: Iterable[JobRecord]
) -> None:
    table, packer = policy.planner.table, policy.planner.packer
    groups = {one.group: GroupState(one.group, one.rollout, one.training) for one in records}
    table.groups.update(groups)
    for record in jobs:
        placed = record.placed
        if record.facts is not None and record.facts.moving:
            if placed.at is None or placed.group not in groups:
                raise ValueError(f"job {placed.job} leaves nodes that no group has")
            size = placed.spec.host_bytes
            table.pin(placed.at, groups[placed.group], size)
            table.unpin(placed.job, stays_resident=True)
    for one in records:
        for placement in one.pinned.values():
            table.pin(
                placement, groups[one.group], policy.placements[placement.job].spec.host_bytes
            )
    # The fleet's record has the machines of all nodes already.
    table.take_changes()
    for group in groups.values():
        packer.refresh(group)
    names = (name for group in groups.values() for name in _names(group))
    table.skip_names(max(map(_number, names), default=0))


def _names(group: GroupState) -> tuple[str, ...]:
    return (group.group, *group.rollout, *group.training)


def _number(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def strangers(policy: ClusterPolicy) -> tuple[NodeId, ...]:
    """Machines in use that the nodes file does not list in the pool that uses them."""
    fleet = policy.fleet
    sides = (
        (pool, name)
        for group in policy.planner.table.groups.values()
        for pool, names in group.by_pool
        for name in names
    )
    found = ((pool, fleet.machines[name]) for pool, name in sides if name in fleet.machines)
    return tuple(machine for pool, machine in found if fleet.pool_of(machine) is not pool)
