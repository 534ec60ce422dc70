"""The table of groups: nodes of each group, jobs pinned to them, and resident jobs per node.

It keeps the invariants (disjoint groups, residency as a hard limit) and decides nothing. Nodes
exist as long as a job is pinned to them. A job that moves stays resident on its old nodes until
it has left; arrivals count it there, and other movers wait for its room.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.model import Placement, Pool
from scheduler.rollmux.planner.residency import Residency


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """Type of a new node of one pool."""

    type: str
    accelerators: int
    price_per_hour: float
    """Price of the whole node."""
    host_bytes: int


@dataclass(slots=True)
class GroupState:
    """A co-execution group: its jobs run their phases in turn on its nodes and nowhere else.

    Leases are elastic extra capacity and no part of it: a group is feasible without any.
    """

    group: GroupId
    rollout: list[NodeId] = field(default_factory=list)
    training: list[NodeId] = field(default_factory=list)
    pinned: dict[JobId, Placement] = field(default_factory=dict)

    @property
    def by_pool(self) -> tuple[tuple[Pool, list[NodeId]], ...]:
        return (Pool.ROLLOUT, self.rollout), (Pool.TRAINING, self.training)

    def beside(self, placement: Placement) -> tuple[JobId, ...]:
        """The other jobs that have one of the placement's nodes."""
        nodes = set(placement.nodes)
        others = ((job, one) for job, one in self.pinned.items() if job != placement.job)
        return tuple(job for job, one in others if not nodes.isdisjoint(one.nodes))

    def masks(self, placement: Placement) -> tuple[int, int]:
        """Bits of a placement's nodes: rollout from 0, training after them."""
        rollout = training = 0
        for node in placement.rollout_nodes:
            rollout |= 1 << self.rollout.index(node)
        for node in placement.training_nodes:
            training |= 1 << (len(self.rollout) + self.training.index(node))
        return rollout, training


class GroupTable:
    def __init__(
        self, types: dict[Pool, NodeType], supply: Mapping[Pool, int] | None = None
    ) -> None:
        self.types = types
        self.supply: Mapping[Pool, int] = supply or {}
        """Number of nodes by pool; unlimited for a pool without an entry."""
        self.groups: dict[GroupId, GroupState] = {}
        self.home: dict[JobId, GroupId] = {}
        self.nodes: dict[NodeId, GroupId] = {}
        host_bytes = {pool: kind.host_bytes for pool, kind in types.items()}
        self.resident = Residency(host_bytes)
        """Host memory in use, with the jobs that are still leaving."""
        self.planned = Residency(host_bytes)
        """Host memory after all present moves."""
        self.up = Counter[Pool]()
        """Count per pool of nodes with a job pinned to them or still leaving."""
        self.committed_per_hour = 0.0
        """Price of the nodes with a pinned job that is not leaving."""
        self._came: dict[NodeId, Pool] = {}
        self._gone: list[NodeId] = []
        self._host_bytes: dict[JobId, int] = {}
        """State of each job that is pinned or leaving."""
        self._pins: dict[NodeId, int] = {}
        self._staying: dict[NodeId, int] = {}
        self._leaving: dict[JobId, list[Placement]] = {}
        self._named = 0

    def fresh_group(self) -> GroupState:
        """A group with a new name; it enters the table with its first pinned job."""
        self._named += 1
        return GroupState(GroupId(f"group-{self._named}"))

    def skip_names(self, last: int) -> None:
        """No name with a number up to `last` is given again."""
        self._named = max(self._named, last)

    def fresh_nodes(self, pool: Pool, count: int) -> tuple[NodeId, ...]:
        """New node names; the nodes are up once a job is pinned to them."""
        self._named += count
        last = self._named
        return tuple(
            NodeId(f"{self.types[pool].type}-{number}")
            for number in range(last - count + 1, last + 1)
        )

    def take_changes(self) -> tuple[dict[NodeId, Pool], list[NodeId]]:
        """Nodes that have come up since the last call, in order, and those that are gone."""
        changes = self._came, self._gone
        self._came, self._gone = {}, []
        return changes

    def pin(self, placement: Placement, group: GroupState, host_bytes: int) -> None:
        """Pins a job, and brings up the nodes that are not.

        Raises ValueError for what no planner may do: a node of another group, or host memory short.
        """
        if not self.planned.has_room(placement, host_bytes):
            raise ValueError(f"the nodes of job {placement.job} lack {host_bytes} bytes")
        self.groups.setdefault(group.group, group)
        for (pool, placed), (_, owned) in zip(placement.by_pool, group.by_pool, strict=True):
            for node in placed:
                if self.nodes.setdefault(node, group.group) != group.group:
                    raise ValueError(f"node {node} belongs to group {self.nodes[node]}")
                if node not in owned:
                    owned.append(node)
                    self._came[node] = pool
                self.up[pool] += node not in self._pins
                self._pins[node] = self._pins.get(node, 0) + 1
        self._host_bytes[placement.job] = host_bytes
        self._settle(placement, group)

    def unpin(self, job: JobId, *, stays_resident: bool = False) -> None:
        """Takes a job out of its group; nodes without another job go down.

        `stays_resident` keeps its memory held until `left`: it still runs there.
        """
        group = self.groups[self.home.pop(job)]
        placement = group.pinned.pop(job)
        self._count(placement, -1)
        if stays_resident:
            self._leaving.setdefault(job, []).append(placement)
        self._count_memory(job)
        if not stays_resident:
            self._release(placement, group)

    def placed(self, job: JobId) -> None:
        """Takes back the last `unpin` of a job that was to stay resident."""
        placement = self._leaving[job].pop()
        if not self._leaving[job]:
            del self._leaving[job]
        self._settle(placement, self.groups[self.nodes[placement.rollout_nodes[0]]])

    def left(self, job: JobId) -> None:
        """The moved or ended job has left every old placement."""
        groups = self.leaving_groups(job)
        for group, placement in zip(groups, self._leaving.pop(job, ()), strict=True):
            self._release(placement, group)
        self._count_memory(job)
        if job not in self.home:
            del self._host_bytes[job]

    def on_node(self, node: NodeId) -> tuple[JobId, ...]:
        """Jobs pinned to the node, whether there already or still on the way."""
        group = self.groups[self.nodes[node]]
        return tuple(job for job, placement in group.pinned.items() if node in placement.nodes)

    def beside(self, placement: Placement, group: GroupId) -> tuple[JobId, ...]:
        """Other jobs of the group that are pinned to nodes of the placement."""
        there = self.groups.get(group)
        return () if there is None else tuple(sorted(there.beside(placement)))

    def leaving_node(self, node: NodeId) -> tuple[JobId, ...]:
        """Jobs still resident on the node but pinned elsewhere."""
        return tuple(
            job
            for job, placements in self._leaving.items()
            if any(node in placement.nodes for placement in placements)
        )

    def replace(self, lost: NodeId) -> None:
        """Replaces a lost node by a new one for every job pinned to it.

        `left` must be called before for each job that was leaving it.
        """
        group = self.groups[self.nodes.pop(lost)]
        pool, owned = next(side for side in group.by_pool if lost in side[1])
        (fresh,) = self.fresh_nodes(pool, 1)
        owned[owned.index(lost)] = fresh
        self.nodes[fresh] = group.group
        for job, placement in group.pinned.items():
            group.pinned[job] = _exchanged(placement, lost, fresh)
        for by_node in (self._pins, self._staying):
            by_node[fresh] = by_node.pop(lost)
        self.resident.replace(lost, fresh)
        self.planned.replace(lost, fresh)
        self._came[fresh] = pool
        self._goes_down(lost)

    def leaving_groups(self, job: JobId) -> list[GroupState]:
        """Groups in which the job is still resident, though pinned elsewhere."""
        placements = self._leaving.get(job, ())
        return [self.groups[self.nodes[placement.rollout_nodes[0]]] for placement in placements]

    def free_nodes(self, pool: Pool) -> int | None:
        """Nodes of the pool that may still come up; None: unlimited."""
        there = self.supply.get(pool)
        return None if there is None else max(0, there - self.up[pool])

    def is_supplied(self, placement: Placement) -> bool:
        """Whether the supply covers the nodes that the placement would bring up."""
        return not self.shortage(placement)

    def shortage(self, placement: Placement) -> dict[Pool, int]:
        """Nodes the placement would bring up, per pool whose free nodes are fewer; else empty."""
        if not self.supply:
            return {}
        short = {}
        for pool, nodes in placement.by_pool:
            needed = sum(node not in self.nodes for node in nodes)
            free = self.free_nodes(pool)
            if free is not None and needed > free:
                short[pool] = needed
        return short

    def price_per_hour(self) -> float:
        """Price of all nodes that are up."""
        return sum(self.group_price_per_hour(group) for group in self.groups.values())

    def group_price_per_hour(self, group: GroupState) -> float:
        return self.price_of(len(group.rollout), len(group.training))

    def price_of(self, rollout: float, training: float) -> float:
        """Dollars per hour of that many nodes of each pool."""
        prices = [self.types[pool].price_per_hour for pool in (Pool.ROLLOUT, Pool.TRAINING)]
        return rollout * prices[0] + training * prices[1]

    def _count_memory(self, job: JobId) -> None:
        home, host_bytes = self.home.get(job), self._host_bytes[job]
        pinned = [] if home is None else [self.groups[home].pinned[job]]
        planned = [node for placement in pinned for node in placement.nodes]
        leaving = [node for placement in self._leaving.get(job, ()) for node in placement.nodes]
        self.planned.keep(job, planned, host_bytes)
        self.resident.keep(job, [*planned, *leaving], host_bytes)

    def _settle(self, placement: Placement, group: GroupState) -> None:
        group.pinned[placement.job] = placement
        self.home[placement.job] = group.group
        self._count_memory(placement.job)
        self._count(placement, 1)

    def _count(self, placement: Placement, change: int) -> None:
        for pool, nodes in placement.by_pool:
            for node in nodes:
                before = self._staying.get(node, 0)
                self._staying[node] = before + change
                if (before == 0) != (before + change == 0):
                    self.committed_per_hour += change * self.types[pool].price_per_hour
                if before + change == 0:
                    del self._staying[node]

    def _release(self, placement: Placement, group: GroupState) -> None:
        for (pool, placed), (_, owned) in zip(placement.by_pool, group.by_pool, strict=True):
            for node in placed:
                self._pins[node] -= 1
                if self._pins[node] == 0:
                    owned.remove(node)
                    self.up[pool] -= 1
                    del self._pins[node], self.nodes[node]
                    self._goes_down(node)
        if not group.rollout and not group.training:
            del self.groups[group.group]

    def _goes_down(self, node: NodeId) -> None:
        # A search that takes its moves back leaves no trace.
        if self._came.pop(node, None) is None:
            self._gone.append(node)


def _exchanged(placement: Placement, lost: NodeId, fresh: NodeId) -> Placement:
    return Placement(
        job=placement.job,
        rollout_nodes=tuple(fresh if node == lost else node for node in placement.rollout_nodes),
        training_nodes=tuple(fresh if node == lost else node for node in placement.training_nodes),
    )
