"""The bill for machines: from the plan's start of one until it gives it back or it fails."""

from collections import Counter
from collections.abc import Iterator

from harvester.contracts.ids import NodeId
from scheduler.model import Node
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.sim.rollmux.ledger import Ledger


class NodeBill:
    def __init__(self, cluster: ClusterPolicy, ledger: Ledger) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._up: set[NodeId] = set()
        self._times: Counter[NodeId] = Counter()

    def settle(self, now: float) -> Iterator[tuple[NodeId, int]]:
        """Machines that came up, and how often each has by now."""
        # What a shell that keeps the plan on a disk has written by now.
        self._cluster.layout_changed = False
        self._cluster.unsaved.clear()
        used = set(self._cluster.fleet.machines.values())
        for node in sorted(self._up - used):
            self._ledger.node_down(node, t_s=now)
        came = sorted(used - self._up)
        self._up = used
        for node in came:
            self._ledger.node_up(self._node(node), t_s=now)
            self._times[node] += 1
            yield node, self._times[node]

    def is_up(self, node: NodeId, times: int) -> bool:
        """Whether the node is up and still in its `times`-th run."""
        return node in self._up and self._times[node] == times

    def _node(self, name: NodeId) -> Node:
        pool = self._cluster.fleet.pool_of(name)
        assert pool is not None
        kind = self._cluster.config.types[pool]
        return Node(
            node=name,
            pool=pool,
            type=kind.type,
            accelerators=kind.accelerators,
            price_per_hour=kind.price_per_hour,
            host_bytes=kind.host_bytes,
        )
