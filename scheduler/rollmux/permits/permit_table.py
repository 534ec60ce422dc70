"""Jobs, the lines that they stand in and the nodes that they hold, kept consistent.

A job enters the lines of all of its nodes at once and under one ticket, so all lines agree on which
job came first: the oldest ticket waits for holders only, never for another that waits. A node has
one holder, and beside it at most one tail, which keeps the first accelerators. Answers which job is
first in line and which jobs block it. Decides nothing and emits nothing.
"""

from bisect import insort
from collections.abc import Iterable, Set
from typing import Any

import msgspec

from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.rollmux.permits.job_permit import JobPermit, PermitStage
from scheduler.rollmux.permits.terms import JobTerms, PermitsConfig

Position = tuple[int, JobId]
"""A ticket and its job."""
KeptTail = tuple[JobId, int]
"""A job, and how many of the node's accelerators its tail keeps."""


class PermitTable:
    def __init__(self, config: PermitsConfig) -> None:
        self.config = config
        self.jobs: dict[JobId, JobPermit] = {}
        self.counters = (0, 0)
        """Last epoch and last ticket; neither is ever given again."""
        self.closed: Set[NodeId] = frozenset()
        """Nodes that have failed: no phase starts there."""
        self._lines: dict[NodeId, list[Position]] = {}
        self._on: dict[NodeId, JobId] = {}
        self._tails: dict[NodeId, KeptTail] = {}
        self._touched: set[NodeId] = set()
        self._loaded: dict[NodeId, JobId] = {}
        """Jobs whose state was left on a node's accelerators without a permit, by node."""

    def snapshot(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(permit) for permit in self.jobs.values()]

    def restore(self, snapshot: list[dict[str, Any]]) -> None:
        """Raises ValueError where two jobs hold the same accelerators."""
        jobs = msgspec.convert(snapshot, list[JobPermit])
        self.jobs = {permit.job: permit for permit in jobs}
        self._lines, self._on, self._tails, self._loaded = {}, {}, {}, {}
        for permit in jobs:
            tails = {node: each for node, each in permit.accelerators.items() if 0 in each}
            whole = tuple(node for node in permit.nodes if node not in tails)
            self._occupy(permit.job, whole)
            for node, kept in tails.items():
                self._keep_tail(permit.job, node, len(kept))
            self._join(permit)
            self._loaded |= dict.fromkeys(permit.loaded, permit.job)

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
        permit = self.jobs.get(job)
        current = permit is not None and permit.holding and permit.epoch == epoch
        return permit if current else None

    def admit(self, terms: JobTerms) -> JobPermit:
        permit = self.jobs.setdefault(terms.job, JobPermit(terms=terms))
        permit.terms = terms
        return permit

    def remove(self, job: JobId) -> None:
        del self.jobs[job]

    def leave_loaded(self, permit: JobPermit) -> None:
        """Records that the state stays on the nodes, except one of which the tail had a part."""
        parts = permit.accelerators
        nodes = tuple(node for node in permit.nodes if 0 not in parts.get(node, ()))
        if not nodes:
            return
        permit.loaded += nodes
        permit.loaded_by = permit.holder
        self._loaded |= dict.fromkeys(nodes, permit.job)

    def unload(self, permit: JobPermit, nodes: tuple[NodeId, ...]) -> None:
        """Removes the job's left-over state from these nodes; nodes under its permit stay."""
        gone = tuple(node for node in nodes if node in permit.loaded)
        for node in gone:
            if self._loaded.get(node) == permit.job:
                del self._loaded[node]
        self._forget_loaded(permit, gone)
        if not permit.loaded:
            permit.loaded_by = ""
            # A new process of the job may have waited for that.
            self.touch(permit.awaits)
        self.touch(gone)

    def _forget_loaded(self, permit: JobPermit, nodes: tuple[NodeId, ...]) -> None:
        permit.loaded = tuple(node for node in permit.loaded if node not in nodes)
        permit.unload = tuple(node for node in permit.unload if node not in nodes)

    def in_the_way(self, permit: JobPermit, node: NodeId) -> JobPermit | None:
        """The job whose state has to leave before this one starts on the node.

        The job itself, while states of an earlier process of it are left on any node.
        """
        if permit.loaded and permit.loaded_by != permit.holder:
            return permit
        job = self._loaded.get(node)
        return None if job is None or job == permit.job else self.jobs[job]

    def touch(self, nodes: Iterable[NodeId]) -> None:
        """Marks changed nodes: jobs that wait for them may start now."""
        self._touched |= set(nodes)

    def touch_lines(self, nodes: Iterable[NodeId]) -> None:
        """Marks changed nodes, except those without a waiting job."""
        self._touched.update(node for node in nodes if self._lines.get(node, ()))

    def take_touched(self) -> tuple[NodeId, ...]:
        """Nodes marked since the last call, sorted."""
        if not self._touched:
            return ()
        touched, self._touched = tuple(sorted(self._touched)), set()
        return touched

    def join(self, permit: JobPermit, ticket: int, nodes: tuple[NodeId, ...]) -> None:
        permit.ticket, permit.awaits = ticket, nodes
        self._join(permit)
        self.touch(nodes)

    def leave_lines(self, permit: JobPermit) -> None:
        self._leave(permit, permit.awaits)
        self.touch(permit.awaits)
        permit.awaits = ()

    def take(self, permit: JobPermit, nodes: tuple[NodeId, ...], *, per_node: int) -> None:
        """Moves the job from the lines onto the nodes; a tail may keep the first accelerators of
        some."""
        self._occupy(permit.job, nodes)
        self._leave(permit, nodes)
        permit.nodes += nodes
        if permit.loaded:
            self._forget_loaded(permit, nodes)
            for node in nodes:
                self._loaded.pop(node, None)
        permit.awaits = tuple(node for node in permit.awaits if node not in nodes)
        tails = ((node, self._tails[node]) for node in nodes if node in self._tails)
        parts = {node: tuple(range(kept, per_node)) for node, (_, kept) in tails}
        if parts:
            permit.accelerators = permit.accelerators | parts

    def free(self, permit: JobPermit, nodes: tuple[NodeId, ...]) -> None:
        self._vacate(permit.job, nodes)
        permit.nodes = tuple(node for node in permit.nodes if node not in nodes)
        if permit.accelerators:
            parts = permit.accelerators
            permit.accelerators = {node: parts[node] for node in parts if node not in nodes}
        self.touch(nodes)

    def narrow(self, permit: JobPermit) -> tuple[NodeId, ...]:
        """Reduces the job to the kept nodes; returns the nodes that it freed, fully or in part."""
        parts = permit.keep_accelerators
        freed = tuple(node for node in permit.nodes if node not in permit.keep)
        self.free(permit, freed)
        for node, kept in parts.items():
            self._keep_tail(permit.job, node, len(kept))
        permit.accelerators = dict(parts)
        permit.was_away |= not permit.nodes
        self.touch(parts)
        return (*freed, *parts)

    def widen(self, permit: JobPermit) -> tuple[NodeId, ...]:
        """Gives the job what other tails have freed on its nodes; returns nodes now whole."""
        parts = permit.accelerators
        whole = tuple(node for node in parts if node not in self._tails)
        if whole:
            permit.accelerators = {node: parts[node] for node in parts if node not in whole}
        return whole

    def on(self, node: NodeId) -> JobId | None:
        return self._on.get(node)

    def free_accelerators(self, node: NodeId, *, per_node: int) -> int:
        """Free accelerators of a node: all of an unused node, or the ones beside a tail."""
        if node in self._on or node in self.closed:
            return 0
        tail = self._tails.get(node)
        return per_node if tail is None else max(0, per_node - tail[1])

    def has_tail(self, node: NodeId) -> bool:
        return node in self._tails

    def holders(self, nodes: Iterable[NodeId]) -> tuple[JobPermit, ...]:
        found = {job for node in nodes if (job := self._on.get(node)) is not None}
        return tuple(self.jobs[job] for job in sorted(found))

    def in_line(self, nodes: Iterable[NodeId]) -> tuple[JobPermit, ...]:
        """Jobs that wait for these nodes, first come first."""
        places = {place for node in nodes for place in self._lines.get(node, ())}
        return tuple(self.jobs[job] for _, job in sorted(places)) if places else ()

    def asks(self, permit: JobPermit, now: float) -> bool:
        """Whether its place in a line blocks the jobs behind it."""
        if permit.holding:
            return True
        if permit.last_call_s is None:
            return now < permit.enqueued_s + self.config.patience_s
        return now < permit.last_call_s + self.config.lease_s

    def waits(self, permit: JobPermit, now: float) -> bool:
        """Whether a worker or a tail of the job waits in line and would start at once."""
        if permit.stage is PermitStage.TAILING:
            return bool(permit.awaits)
        return permit.claimed and self.asks(permit, now)

    def waiting_at(self, node: NodeId, now: float) -> tuple[JobId, ...]:
        line = (job for _, job in self._lines.get(node, ()))
        return tuple(job for job in line if self.waits(self.jobs[job], now))

    def is_requested(self, permit: JobPermit, now: float) -> bool:
        return any(self.waiting_at(node, now) for node in permit.nodes)

    def ahead(self, permit: JobPermit, now: float) -> frozenset[JobId]:
        """Jobs that hold its nodes or precede it in their lines."""
        before = {
            other
            for node in permit.awaits
            for other in self._jobs_before(permit.ticket, node)
            if self.asks(self.jobs[other], now)
        }
        on = (self._on.get(node) for node in permit.awaits)
        return frozenset(before | {job for job in on if job is not None})

    def is_first(self, permit: JobPermit, node: NodeId, now: float) -> bool:
        """Whether no job before it blocks the node."""
        ahead = self._jobs_before(permit.ticket, node)
        return not any(self.asks(self.jobs[job], now) for job in ahead)

    def open_to(self, permit: JobPermit, now: float) -> tuple[NodeId, ...]:
        """Nodes that it awaits and may take now: unused, open, and with no blocking job before
        it."""
        return tuple(
            node
            for node in permit.awaits
            if node not in self._on
            and node not in self.closed
            and self.in_the_way(permit, node) is None
            and self.is_first(permit, node, now)
        )

    def under_tail(self, node: NodeId) -> bool:
        """Whether a tail holds the whole node."""
        job = self._on.get(node)
        return job is not None and self.jobs[job].stage is PermitStage.TAILING

    def _jobs_before(self, ticket: int, node: NodeId) -> list[JobId]:
        return [job for place, job in self._lines.get(node, ()) if place < ticket]

    def _join(self, permit: JobPermit) -> None:
        for node in permit.awaits:
            insort(self._lines.setdefault(node, []), (permit.ticket, permit.job))

    def _leave(self, permit: JobPermit, nodes: tuple[NodeId, ...]) -> None:
        """Removes the job from the lines of `nodes`."""
        own = (permit.ticket, permit.job)
        for node in nodes:
            line = self._lines.get(node, [])
            if own in line:
                line.remove(own)
            if not line:
                self._lines.pop(node, None)

    def _occupy(self, job: JobId, nodes: tuple[NodeId, ...]) -> None:
        """Raises ValueError where another is on one of them: a permit is never held twice."""
        taken = [node for node in nodes if node in self._on]
        if taken:
            raise ValueError(f"{job} on {taken}: held by {[self._on[node] for node in taken]}")
        self._on |= dict.fromkeys(nodes, job)

    def _keep_tail(self, job: JobId, node: NodeId, accelerators: int) -> None:
        """Keeps the tail on `node`. Raises ValueError if another tail is there."""
        if node in self._tails:
            raise ValueError(f"{job} on {node}: the tail of {self._tails[node][0]} is there")
        self._vacate(job, (node,))
        self._tails[node] = (job, accelerators)

    def _vacate(self, job: JobId, nodes: tuple[NodeId, ...]) -> None:
        for node in nodes:
            if self._on.get(node) == job:
                del self._on[node]
            elif (tail := self._tails.get(node)) is not None and tail[0] == job:
                del self._tails[node]
