"""The ledger of host memory: the nodes that hold each job's state, and the room left on each.

A node's host memory is a hard limit; a job's state is stored once per node, however often the job
is put there. One ledger holds the planned state, another the actual one.
"""

from collections.abc import Iterable, Mapping

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import Placement, Pool


class Residency:
    def __init__(self, host_bytes: Mapping[Pool, int]) -> None:
        """`host_bytes` of a node of each pool."""
        self._host_bytes = host_bytes
        self._bytes: dict[NodeId, dict[JobId, int]] = {}
        self._nodes: dict[JobId, tuple[NodeId, ...]] = {}

    def keep(self, job: JobId, nodes: Iterable[NodeId], host_bytes: int) -> None:
        """The job's state is on these nodes and on no other."""
        for node in self._nodes.pop(job, ()):
            del self._bytes[node][job]
            if not self._bytes[node]:
                del self._bytes[node]
        if distinct := tuple(dict.fromkeys(nodes)):
            self._nodes[job] = distinct
            for node in distinct:
                self._bytes.setdefault(node, {})[job] = host_bytes

    def replace(self, lost: NodeId, fresh: NodeId) -> None:
        """Moves every job of the lost node to the fresh one."""
        if (jobs := self._bytes.pop(lost, None)) is None:
            return
        self._bytes[fresh] = jobs
        for job in jobs:
            self._nodes[job] = tuple(fresh if node == lost else node for node in self._nodes[job])

    def nodes_of(self, job: JobId) -> tuple[NodeId, ...]:
        return self._nodes.get(job, ())

    def jobs_on(self, node: NodeId) -> tuple[JobId, ...]:
        return tuple(self._bytes.get(node, ()))

    def kept(self, job: JobId, placement: Placement) -> tuple[NodeId, ...]:
        """Nodes that have the job's state and are the placement's too."""
        return tuple(node for node in self.nodes_of(job) if node in placement.nodes)

    def free_bytes(self, node: NodeId, pool: Pool) -> int:
        return self._host_bytes[pool] - sum(self._bytes.get(node, {}).values())

    def takes(self, job: JobId, node: NodeId, pool: Pool, host_bytes: int) -> bool:
        """Whether the node has room for the job, or holds its state already."""
        return job in self._bytes.get(node, ()) or self.free_bytes(node, pool) >= host_bytes

    def has_room(self, placement: Placement, host_bytes: int) -> bool:
        """Whether all of the placement's nodes have room for the job."""
        return all(
            self.takes(placement.job, node, pool, host_bytes)
            for pool, nodes in placement.by_pool
            for node in nodes
        )
