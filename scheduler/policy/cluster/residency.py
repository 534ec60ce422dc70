"""Whose state is in the host memory of which node, by bytes; a node's memory is a hard limit.

Told what happened, it answers who has room where. The planner's book counts what it has asked for;
this counts what is there.
"""

from collections.abc import Iterable

from harvester.contracts.ids import NodeId
from scheduler.policy.cluster.stays import Stay
from scheduler.policy.cluster.submission import nodes_of
from scheduler.policy.groups.book import NodeType
from scheduler.policy.model import Placement, Pool


class Residency:
    def __init__(self, types: dict[Pool, NodeType]) -> None:
        self._types = types
        self._bytes: dict[NodeId, int] = {}

    def hold(self, stay: Stay, nodes: Iterable[NodeId]) -> None:
        """The job's state is on these nodes and on no other."""
        size = stay.submission.host_bytes
        for node in stay.held:
            self._bytes[node] -= size
            if self._bytes[node] == 0:
                del self._bytes[node]
        stay.held = ()
        self.restore(stay, nodes)

    def restore(self, stay: Stay, nodes: Iterable[NodeId]) -> None:
        """The same, of a job that was on none."""
        stay.held = tuple(dict.fromkeys(nodes))
        for node in stay.held:
            self._bytes[node] = self._bytes.get(node, 0) + stay.submission.host_bytes

    def has_room(self, stay: Stay, placement: Placement) -> bool:
        size = stay.submission.host_bytes
        return all(
            self._bytes.get(node, 0) + size <= self._types[pool].host_bytes
            for pool, nodes in (
                (Pool.ROLLOUT, placement.rollout_nodes),
                (Pool.TRAINING, placement.training_nodes),
            )
            for node in nodes
            if node not in stay.held
        )


def kept_nodes(stay: Stay, placement: Placement) -> tuple[NodeId, ...]:
    """Nodes that hold the job's state and are the placement's too."""
    wanted = set(nodes_of(placement))
    return tuple(node for node in stay.held if node in wanted)
