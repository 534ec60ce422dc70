"""The line in front of every node, and which jobs are on it.

A job enters the lines of all of its nodes at once and under one ticket, so all lines agree on which
job came first: the oldest ticket waits for holders only, never for another that waits. A node has
one holder, and beside it at most one tail, which keeps the first accelerators. Knows no time and
decides nothing.
"""

from bisect import insort

from harvester.contracts.ids import JobId, NodeId

Place = tuple[int, JobId]
Tail = tuple[JobId, int]
"""A job, and how many of the node's accelerators its tail keeps."""


class NodeLines:
    def __init__(self) -> None:
        self._lines: dict[NodeId, list[Place]] = {}
        self._on: dict[NodeId, JobId] = {}
        self._tails: dict[NodeId, Tail] = {}

    def join(self, ticket: int, job: JobId, nodes: tuple[NodeId, ...]) -> None:
        for node in nodes:
            insort(self._lines.setdefault(node, []), (ticket, job))

    def leave(self, ticket: int, job: JobId, nodes: tuple[NodeId, ...]) -> None:
        """Removes the ticket from the lines of `nodes`, where it stands in them."""
        for node in nodes:
            line = self._lines.get(node, [])
            if (ticket, job) in line:
                line.remove((ticket, job))
            if not line:
                self._lines.pop(node, None)

    def line(self, node: NodeId) -> list[Place]:
        """The node's line; read-only for callers."""
        return self._lines.get(node, [])

    def ahead(self, ticket: int, node: NodeId) -> list[JobId]:
        """Jobs that stand before this ticket."""
        return [job for place, job in self.line(node) if place < ticket]

    def on(self, node: NodeId) -> JobId | None:
        return self._on.get(node)

    def tail_on(self, node: NodeId) -> Tail | None:
        return self._tails.get(node)

    def occupy(self, job: JobId, nodes: tuple[NodeId, ...]) -> None:
        """Raises ValueError where another is on one of them: a permit is never held twice."""
        taken = [node for node in nodes if node in self._on]
        if taken:
            raise ValueError(f"{job} on {taken}: held by {[self._on[node] for node in taken]}")
        self._on |= dict.fromkeys(nodes, job)

    def keep_tail(self, job: JobId, node: NodeId, accelerators: int) -> None:
        """Raises ValueError where another tail is there."""
        if node in self._tails:
            raise ValueError(f"{job} on {node}: the tail of {self._tails[node][0]} is there")
        self.free(job, (node,))
        self._tails[node] = (job, accelerators)

    def free(self, job: JobId, nodes: tuple[NodeId, ...]) -> None:
        for node in nodes:
            if self._on.get(node) == job:
                del self._on[node]
            elif (tail := self._tails.get(node)) is not None and tail[0] == job:
                del self._tails[node]
