"""The book of groups: nodes of each group, jobs pinned to them, and resident jobs per node.

It keeps the invariants (disjoint groups, residency as a hard limit) and decides nothing. Nodes
exist as long as a job is pinned to them. A job that moves stays resident on its old nodes until
it has left; arrivals count it there, and other movers wait for its room.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.model import Group, Node, Placement, Pool
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
    """One group; mutable."""

    group: GroupId
    rollout: list[NodeId] = field(default_factory=list)
    training: list[NodeId] = field(default_factory=list)
    pinned: dict[JobId, Placement] = field(default_factory=dict)

    def masks(self, placement: Placement) -> tuple[int, int]:
        """Bits of a placement's nodes: rollout from 0, training after them."""
        rollout = training = 0
        for node in placement.rollout_nodes:
            rollout |= 1 << self.rollout.index(node)
        for node in placement.training_nodes:
            training |= 1 << (len(self.rollout) + self.training.index(node))
        return rollout, training

    def as_group(self) -> Group:
        return Group(
            group=self.group,
            rollout_nodes=tuple(self.rollout),
            training_nodes=tuple(self.training),
            placements=tuple(self.pinned.values()),
        )


class GroupTable:
    def __init__(
        self, types: dict[Pool, NodeType], supply: Mapping[Pool, int] | None = None
    ) -> None:
        self.types = types
        self.supply: Mapping[Pool, int] = supply or {}
        """Number of nodes by pool; unlimited for a pool without an entry."""
        self.cells: dict[GroupId, GroupState] = {}
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
        self._pins: dict[NodeId, int] = {}
        self._staying: dict[NodeId, int] = {}
        self._leaving: dict[JobId, list[Placement]] = {}
        self._named = 0

    def fresh_group(self) -> GroupState:
        """A cell with a new name; it enters the book with its first pinned job."""
        self._named += 1
        return GroupState(GroupId(f"group-{self._named}"))

    def fresh_nodes(self, pool: Pool, count: int) -> tuple[NodeId, ...]:
        """New node names; the nodes are up once a job is pinned to them."""
        self._named += count
        last = self._named
        return tuple(
            NodeId(f"{self.types[pool].type}-{number}")
            for number in range(last - count + 1, last + 1)
        )

    def pin(self, placement: Placement, cell: GroupState, host_bytes: int) -> tuple[Node, ...]:
        """Pins a job, and returns the nodes that this brings up.

        Raises ValueError for what no planner may do: a node of another group, or host memory short.
        """
        if not self.planned.has_room(placement, host_bytes):
            raise ValueError(f"the nodes of job {placement.job} lack {host_bytes} bytes")
        up: list[Node] = []
        self.cells.setdefault(cell.group, cell)
        sides = (
            (Pool.ROLLOUT, placement.rollout_nodes, cell.rollout),
            (Pool.TRAINING, placement.training_nodes, cell.training),
        )
        for pool, wanted, owned in sides:
            for node in wanted:
                if self.nodes.setdefault(node, cell.group) != cell.group:
                    raise ValueError(f"node {node} belongs to {self.nodes[node]}")
                if node not in owned:
                    owned.append(node)
                    up.append(self._node(node, pool))
                self.up[pool] += node not in self._pins
                self._pins[node] = self._pins.get(node, 0) + 1
        self._settle(placement, cell, host_bytes)
        return tuple(up)

    def unpin(
        self, job: JobId, host_bytes: int, *, stays_resident: bool = False
    ) -> tuple[NodeId, ...]:
        """Takes a job out of its group, and returns the nodes that go down with it.

        `stays_resident` keeps its memory held until `left`: it still runs there.
        """
        cell = self.cells[self.home.pop(job)]
        placement = cell.pinned.pop(job)
        self._count(placement, -1)
        if stays_resident:
            self._leaving.setdefault(job, []).append(placement)
        self._count_memory(job, host_bytes)
        return () if stays_resident else self._release(placement, cell)

    def placed(self, job: JobId, host_bytes: int) -> None:
        """Takes back the last `unpin` of a job that was to stay resident."""
        placement = self._leaving[job].pop()
        if not self._leaving[job]:
            del self._leaving[job]
        self._settle(placement, self.cells[self.nodes[placement.rollout_nodes[0]]], host_bytes)

    def left(self, job: JobId, host_bytes: int) -> tuple[NodeId, ...]:
        """The moved or ended job has left every old place; returns the nodes that go down."""
        down: list[NodeId] = []
        cells = self.leaving_cells(job)
        for cell, placement in zip(cells, self._leaving.pop(job, ()), strict=True):
            down += self._release(placement, cell)
        self._count_memory(job, host_bytes)
        return tuple(down)

    def on_node(self, node: NodeId) -> tuple[JobId, ...]:
        """Jobs pinned to the node, whether there already or still on the way."""
        cell = self.cells[self.nodes[node]]
        return tuple(job for job, placement in cell.pinned.items() if _uses(placement, node))

    def leaving_node(self, node: NodeId) -> tuple[JobId, ...]:
        """Jobs still resident on the node but pinned elsewhere."""
        return tuple(
            job
            for job, placements in self._leaving.items()
            if any(_uses(placement, node) for placement in placements)
        )

    def replace(self, lost: NodeId) -> Node:
        """Replaces a lost node by a new one for every job pinned to it.

        `left` must be called before for each job that was leaving it.
        """
        cell = self.cells[self.nodes.pop(lost)]
        pool = Pool.ROLLOUT if lost in cell.rollout else Pool.TRAINING
        (fresh,) = self.fresh_nodes(pool, 1)
        owned = cell.rollout if pool is Pool.ROLLOUT else cell.training
        owned[owned.index(lost)] = fresh
        self.nodes[fresh] = cell.group
        for job, placement in cell.pinned.items():
            cell.pinned[job] = _exchanged(placement, lost, fresh)
        for by_node in (self._pins, self._staying):
            by_node[fresh] = by_node.pop(lost)
        self.resident.replace(lost, fresh)
        self.planned.replace(lost, fresh)
        return self._node(fresh, pool)

    def leaving_cells(self, job: JobId) -> list[GroupState]:
        """Groups in which the job is still resident, though pinned elsewhere."""
        placements = self._leaving.get(job, ())
        return [self.cells[self.nodes[placement.rollout_nodes[0]]] for placement in placements]

    def is_leaving(self, job: JobId) -> bool:
        return job in self._leaving

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
        sides = ((Pool.ROLLOUT, placement.rollout_nodes), (Pool.TRAINING, placement.training_nodes))
        short = {}
        for pool, nodes in sides:
            wanted = sum(node not in self.nodes for node in nodes)
            free = self.free_nodes(pool)
            if free is not None and wanted > free:
                short[pool] = wanted
        return short

    def price_per_hour(self) -> float:
        """Price of all nodes that are up."""
        return sum(self.cell_price_per_hour(cell) for cell in self.cells.values())

    def cell_price_per_hour(self, cell: GroupState) -> float:
        rollout, training = self.types[Pool.ROLLOUT], self.types[Pool.TRAINING]
        return (
            len(cell.rollout) * rollout.price_per_hour
            + len(cell.training) * training.price_per_hour
        )

    def _count_memory(self, job: JobId, host_bytes: int) -> None:
        home = self.home.get(job)
        pinned = [] if home is None else [self.cells[home].pinned[job]]
        self.planned.hold(job, _nodes_of(pinned), host_bytes)
        leaving = self._leaving.get(job, ())
        self.resident.hold(job, _nodes_of([*pinned, *leaving]), host_bytes)

    def _settle(self, placement: Placement, cell: GroupState, host_bytes: int) -> None:
        cell.pinned[placement.job] = placement
        self.home[placement.job] = cell.group
        self._count_memory(placement.job, host_bytes)
        self._count(placement, 1)

    def _count(self, placement: Placement, change: int) -> None:
        for pool, nodes in (
            (Pool.ROLLOUT, placement.rollout_nodes),
            (Pool.TRAINING, placement.training_nodes),
        ):
            for node in nodes:
                before = self._staying.get(node, 0)
                self._staying[node] = before + change
                if (before == 0) != (before + change == 0):
                    self.committed_per_hour += change * self.types[pool].price_per_hour
                if before + change == 0:
                    del self._staying[node]

    def _node(self, node: NodeId, pool: Pool) -> Node:
        kind = self.types[pool]
        return Node(
            node=node,
            pool=pool,
            type=kind.type,
            accelerators=kind.accelerators,
            price_per_hour=kind.price_per_hour,
            host_bytes=kind.host_bytes,
        )

    def _release(self, placement: Placement, cell: GroupState) -> tuple[NodeId, ...]:
        down: list[NodeId] = []
        for pool, owned, wanted in (
            (Pool.ROLLOUT, cell.rollout, placement.rollout_nodes),
            (Pool.TRAINING, cell.training, placement.training_nodes),
        ):
            for node in wanted:
                self._pins[node] -= 1
                if self._pins[node] == 0:
                    owned.remove(node)
                    self.up[pool] -= 1
                    del self._pins[node], self.nodes[node]
                    down.append(node)
        if not cell.rollout and not cell.training:
            del self.cells[cell.group]
        return tuple(down)


def _nodes_of(placements: Iterable[Placement]) -> list[NodeId]:
    return [node for one in placements for node in (*one.rollout_nodes, *one.training_nodes)]


def _uses(placement: Placement, node: NodeId) -> bool:
    return node in placement.rollout_nodes or node in placement.training_nodes


def _exchanged(placement: Placement, lost: NodeId, fresh: NodeId) -> Placement:
    return Placement(
        job=placement.job,
        rollout_nodes=tuple(fresh if node == lost else node for node in placement.rollout_nodes),
        training_nodes=tuple(fresh if node == lost else node for node in placement.training_nodes),
    )
