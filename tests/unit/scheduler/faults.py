"""Broken invariants of groups and leases, in words."""

from collections import Counter
from collections.abc import Iterable, Mapping

from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.model import JobSpec, Lease
from scheduler.rollmux.planner.group_table import GroupState


def group_faults(
    groups: Iterable[GroupState],
    *,
    host_bytes: Mapping[NodeId, int],
    jobs: Mapping[JobId, JobSpec],
) -> tuple[str, ...]:
    """Every broken invariant in words: groups are disjoint, pins stay inside, state fits."""
    faults: list[str] = []
    owner: dict[NodeId, GroupId] = {}
    home: dict[JobId, GroupId] = {}
    resident: Counter[NodeId] = Counter()
    for group in groups:
        for node in (*group.rollout, *group.training):
            if owner.setdefault(node, group.group) != group.group:
                faults.append(f"node {node} is in groups {owner[node]} and {group.group}")
        for placement in group.pinned.values():
            if home.setdefault(placement.job, group.group) != group.group:
                faults.append(f"job {placement.job} is in two groups")
            outside = set(placement.rollout_nodes) - set(group.rollout)
            outside |= set(placement.training_nodes) - set(group.training)
            faults += [f"job {placement.job} is pinned outside its group" for _ in outside]
            for node in set(placement.nodes):
                resident[node] += jobs[placement.job].host_bytes
    for node, held_bytes in sorted(resident.items()):
        if held_bytes > host_bytes[node]:
            faults.append(f"node {node} holds {held_bytes} bytes of {host_bytes[node]}")
    return tuple(faults)


def lease_faults(leases: Iterable[Lease]) -> tuple[str, ...]:
    """Violations of the rule of one active job per slot."""
    held = Counter(lease.slot for lease in leases)
    return tuple(
        f"slot {slot} is leased {count} times" for slot, count in sorted(held.items()) if count > 1
    )
