"""Jobs, the lines that they stand in and the nodes that they hold, kept consistent.

Answers which job is first in line and which jobs block it. Decides nothing and emits nothing.
"""

from collections.abc import Iterable, Set
from typing import Any

import msgspec

from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.rollmux.permits.lines import NodeLines, Tail
from scheduler.rollmux.permits.standing import JobPermit, PermitStage
from scheduler.rollmux.permits.terms import JobTerms, PermitsConfig


class PermitTable:
    def __init__(self, config: PermitsConfig) -> None:
        self.config = config
        self.jobs: dict[JobId, JobPermit] = {}
        self.counters = (0, 0)
        """Last epoch and last ticket; neither is ever given again."""
        self.closed: Set[NodeId] = frozenset()
        """Nodes that have failed: no phase starts there."""
        self._lines = NodeLines()
        self._touched: set[NodeId] = set()
        self._loaded: dict[NodeId, JobId] = {}
        """Per node, the job whose state was left on its accelerators without a permit."""

    def snapshot(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(standing) for standing in self.jobs.values()]

    def restore(self, snapshot: list[dict[str, Any]]) -> None:
        """Raises ValueError where two jobs hold the same accelerators."""
        jobs = msgspec.convert(snapshot, list[JobPermit])
        self.jobs = {standing.job: standing for standing in jobs}
        self._lines = NodeLines()
        for standing in jobs:
            tails = {node: each for node, each in standing.accelerators.items() if 0 in each}
            whole = tuple(node for node in standing.nodes if node not in tails)
            self._lines.occupy(standing.job, whole)
            for node, kept in tails.items():
                self._lines.keep_tail(standing.job, node, len(kept))
            self._lines.join(standing.ticket, standing.job, standing.awaits)
            self._loaded |= dict.fromkeys(standing.loaded, standing.job)

    def next_epoch(self) -> Epoch:
        epoch, ticket = self.counters
        self.counters = (epoch + 1, ticket)
        return Epoch(epoch + 1)

    def next_ticket(self) -> int:
        epoch, ticket = self.counters
        self.counters = (epoch, ticket + 1)
        return ticket + 1

    def holder(self, job: JobId, epoch: Epoch) -> JobPermit | None:
        """The job, if it holds a permit of that epoch."""
        standing = self.jobs.get(job)
        current = standing is not None and standing.holding and standing.epoch == epoch
        return standing if current else None

    def admit(self, terms: JobTerms) -> JobPermit:
        standing = self.jobs.setdefault(terms.job, JobPermit(terms=terms))
        standing.terms = terms
        return standing

    def remove(self, job: JobId) -> None:
        del self.jobs[job]

    def leave_loaded(self, standing: JobPermit) -> None:
        """Its state stays on its nodes' accelerators, but for the part that its tail had of one."""
        parts = standing.accelerators
        nodes = tuple(node for node in standing.nodes if 0 not in parts.get(node, ()))
        standing.loaded += nodes
        standing.loaded_by = standing.holder
        self._loaded |= dict.fromkeys(nodes, standing.job)

    def unload(self, standing: JobPermit, nodes: tuple[NodeId, ...]) -> None:
        """Removes the job's left-over state from these nodes; nodes under its permit stay."""
        gone = tuple(node for node in nodes if node in standing.loaded)
        for node in gone:
            del self._loaded[node]
        self._forget_loaded(standing, gone)
        self.touch(gone)

    def _forget_loaded(self, standing: JobPermit, nodes: tuple[NodeId, ...]) -> None:
        standing.loaded = tuple(node for node in standing.loaded if node not in nodes)
        standing.unload = tuple(node for node in standing.unload if node not in nodes)

    def loaded_by_other(self, standing: JobPermit, node: NodeId) -> JobPermit | None:
        """The job whose state has to leave the node before this one starts there."""
        job = self._loaded.get(node)
        return None if job is None or job == standing.job else self.jobs[job]

    def touch(self, nodes: Iterable[NodeId]) -> None:
        """Marks changed nodes: jobs that wait for them may start now."""
        self._touched |= set(nodes)

    def touch_lines(self, nodes: Iterable[NodeId]) -> None:
        """Marks changed nodes, except those without a waiting job."""
        self._touched.update(node for node in nodes if self._lines.line(node))

    def settle(self) -> tuple[NodeId, ...]:
        """Nodes marked since the last call, sorted."""
        if not self._touched:
            return ()
        touched, self._touched = tuple(sorted(self._touched)), set()
        return touched

    def join(self, standing: JobPermit, ticket: int, nodes: tuple[NodeId, ...]) -> None:
        standing.ticket, standing.awaits = ticket, nodes
        self._lines.join(ticket, standing.job, nodes)
        self.touch(nodes)

    def leave_lines(self, standing: JobPermit) -> None:
        self._lines.leave(standing.ticket, standing.job, standing.awaits)
        self.touch(standing.awaits)
        standing.awaits = ()

    def take(self, standing: JobPermit, nodes: tuple[NodeId, ...], *, per_node: int) -> None:
        """Moves the job from the lines onto the nodes; a tail may keep the first accelerators of
        some."""
        self._lines.occupy(standing.job, nodes)
        self._lines.leave(standing.ticket, standing.job, nodes)
        standing.nodes += nodes
        if standing.loaded:
            self._forget_loaded(standing, nodes)
            for node in nodes:
                self._loaded.pop(node, None)
        standing.awaits = tuple(node for node in standing.awaits if node not in nodes)
        parts = {node: tuple(range(tail[1], per_node)) for node, tail in self._tails(nodes)}
        if parts:
            standing.accelerators = standing.accelerators | parts

    def free(self, standing: JobPermit, nodes: tuple[NodeId, ...]) -> None:
        self._lines.free(standing.job, nodes)
        standing.nodes = tuple(node for node in standing.nodes if node not in nodes)
        if standing.accelerators:
            parts = standing.accelerators
            standing.accelerators = {node: parts[node] for node in parts if node not in nodes}
        self.touch(nodes)

    def narrow(self, standing: JobPermit) -> tuple[NodeId, ...]:
        """Reduces the job to the kept nodes; returns the nodes that it freed, fully or in part."""
        parts = standing.keep_accelerators
        freed = tuple(node for node in standing.nodes if node not in standing.keep)
        self.free(standing, freed)
        for node, kept in parts.items():
            self._lines.keep_tail(standing.job, node, len(kept))
        standing.accelerators = dict(parts)
        standing.was_away |= not standing.nodes
        self.touch(parts)
        return (*freed, *parts)

    def widen(self, standing: JobPermit) -> tuple[NodeId, ...]:
        """Gives the job what other jobs' tails have freed of its nodes; returns those now whole."""
        parts = standing.accelerators
        whole = tuple(node for node in parts if self._lines.tail_on(node) is None)
        if whole:
            standing.accelerators = {node: parts[node] for node in parts if node not in whole}
        return whole

    def on(self, node: NodeId) -> JobId | None:
        return self._lines.on(node)

    def free_accelerators(self, node: NodeId, *, per_node: int) -> int:
        """Free accelerators of a node: all if it is unused, or those beside a tail."""
        if self._lines.on(node) is not None or node in self.closed:
            return 0
        tail = self._lines.tail_on(node)
        return per_node if tail is None else max(0, per_node - tail[1])

    def has_tail(self, node: NodeId) -> bool:
        return self._lines.tail_on(node) is not None

    def holders(self, nodes: Iterable[NodeId]) -> tuple[JobPermit, ...]:
        found = {job for node in nodes if (job := self._lines.on(node)) is not None}
        return tuple(self.jobs[job] for job in sorted(found))

    def in_line(self, nodes: Iterable[NodeId]) -> tuple[JobPermit, ...]:
        """Jobs that stand before these nodes, first come first."""
        places = {place for node in nodes for place in self._lines.line(node)}
        return tuple(self.jobs[job] for _, job in sorted(places)) if places else ()

    def _tails(self, nodes: Iterable[NodeId]) -> Iterable[tuple[NodeId, Tail]]:
        found = ((node, self._lines.tail_on(node)) for node in nodes)
        return ((node, tail) for node, tail in found if tail is not None)

    def asks(self, standing: JobPermit, now: float) -> bool:
        """Whether its place in a line blocks the jobs behind it."""
        if standing.holding:
            return True
        if standing.heard_s is None:
            return now < standing.enqueued_s + self.config.patience_s
        return now < standing.heard_s + self.config.lease_s

    def waits(self, standing: JobPermit, now: float) -> bool:
        """Whether a worker or a tail of the job waits in line and would start at once."""
        if standing.stage is PermitStage.TAILING:
            return bool(standing.awaits)
        claimed = standing.stage is PermitStage.WAITING and standing.heard_s is not None
        return claimed and self.asks(standing, now)

    def waiting_at(self, node: NodeId, now: float) -> tuple[JobId, ...]:
        line = (job for _, job in self._lines.line(node))
        return tuple(job for job in line if self.waits(self.jobs[job], now))

    def wanted(self, standing: JobPermit, now: float) -> bool:
        return any(self.waiting_at(node, now) for node in standing.nodes)

    def ahead(self, standing: JobPermit, now: float) -> frozenset[JobId]:
        """Jobs that hold its nodes or precede it in their lines."""
        before = {
            other
            for node in standing.awaits
            for other in self._lines.ahead(standing.ticket, node)
            if self.asks(self.jobs[other], now)
        }
        on = (self._lines.on(node) for node in standing.awaits)
        return frozenset(before | {job for job in on if job is not None})

    def is_first(self, standing: JobPermit, node: NodeId, now: float) -> bool:
        """Whether no job before it blocks the node."""
        ahead = self._lines.ahead(standing.ticket, node)
        return not any(self.asks(self.jobs[job], now) for job in ahead)

    def open_to(self, standing: JobPermit, now: float) -> tuple[NodeId, ...]:
        """Nodes that it awaits and may take now: unused, open, and with no blocking job before
        it."""
        return tuple(
            node
            for node in standing.awaits
            if self._lines.on(node) is None
            and node not in self.closed
            and self.loaded_by_other(standing, node) is None
            and self.is_first(standing, node, now)
        )

    def under_tail(self, node: NodeId) -> bool:
        """Whether a tail holds the whole node."""
        job = self._lines.on(node)
        return job is not None and self.jobs[job].stage is PermitStage.TAILING
