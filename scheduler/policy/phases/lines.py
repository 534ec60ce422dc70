"""The line in front of every node, and who is on it.

A job enters the lines of all of its nodes at once and under one ticket, so all lines agree on who
came first: the oldest ticket waits for holders only, never for another that waits. Knows no time
and decides nothing.
"""

from bisect import insort

from harvester.contracts.ids import JobId, NodeId

Place = tuple[int, JobId]


class NodeLines:
    def __init__(self) -> None:
        self._lines: dict[NodeId, list[Place]] = {}
        self._on: dict[NodeId, JobId] = {}

    def join(self, ticket: int, job: JobId, nodes: tuple[NodeId, ...]) -> None:
        for node in nodes:
            insort(self._lines.setdefault(node, []), (ticket, job))

    def leave(self, ticket: int, job: JobId, nodes: tuple[NodeId, ...]) -> None:
        """From the lines of `nodes`, where it stands in them."""
        for node in nodes:
            line = self._lines.get(node, [])
            if (ticket, job) in line:
                line.remove((ticket, job))
            if not line:
                self._lines.pop(node, None)

    def line(self, node: NodeId) -> tuple[Place, ...]:
        return tuple(self._lines.get(node, ()))

    def ahead(self, ticket: int, node: NodeId) -> tuple[JobId, ...]:
        """Who stands before this ticket."""
        return tuple(job for place, job in self.line(node) if place < ticket)

    def on(self, node: NodeId) -> JobId | None:
        return self._on.get(node)

    def occupy(self, job: JobId, nodes: tuple[NodeId, ...]) -> None:
        """Raises ValueError where another is on one of them: a permit is never held twice."""
        taken = [node for node in nodes if node in self._on]
        if taken:
            raise ValueError(f"{job} on {taken}: held by {[self._on[node] for node in taken]}")
        self._on |= dict.fromkeys(nodes, job)

    def free(self, job: JobId, nodes: tuple[NodeId, ...]) -> None:
        for node in nodes:
            if self._on.get(node) == job:
                del self._on[node]
