"""One job's permits in the journal: the wait for each, and the jobs that it waited for."""

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

import msgspec

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.cluster.runtime_events import RuntimeEffect
from scheduler.rollmux.explain.history_entry import EventKind, HistoryEntry, nodes_in_words, seconds
from scheduler.rollmux.explain.journal_lines import JournalMoment
from scheduler.rollmux.permits.events import (
    DropPlace,
    EndPermit,
    EnqueuePhase,
    FreeNodes,
    GrantPermit,
    NarrowPhase,
    PermitEndReason,
    RevokePermit,
    UnloadNodes,
    WarnHolder,
    WidenPermit,
)
from scheduler.rollmux.permits.job_permit import JobPermit

_SHOWN = 3
"""Most jobs named in an answer."""


class PermitSummary(msgspec.Struct, kw_only=True):
    """All permits for one kind of phase."""

    kind: PhaseKind
    waits_s: list[float] = []
    held_s: list[float] = []
    """Durations of completed permits, in s."""
    solo_s: list[float] = []
    """Durations of the same phases alone on their nodes, in s."""
    behind_s: dict[JobId, float] = {}
    """Time that each job on the awaited nodes was waited for, in s."""
    happened: dict[str, int] = {}
    ended: dict[PermitEndReason, int] = {}

    def document(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "granted": len(self.waits_s),
            "wait_median_s": median(self.waits_s) if self.waits_s else None,
            "wait_longest_s": max(self.waits_s, default=None),
            "behind_s": self.behind_s,
            "held_median_s": median(self.held_s) if self.held_s else None,
            "solo_median_s": median(self.solo_s) if self.solo_s else None,
            "happened": self.happened,
            "ended": self.ended,
        }


class NodeHolders:
    """Jobs on each node, and jobs that a waiting job has waited for, from permit effects."""

    def __init__(self) -> None:
        self._on: dict[NodeId, set[JobId]] = {}
        self._keeps: dict[JobId, tuple[NodeId, ...]] = {}
        """Nodes that a tail was asked to keep."""

    def begin(self, job_permits: Iterable[JobPermit]) -> None:
        """Starts over with the records of a snapshot."""
        self._on, self._keeps = {}, {}
        for permit in job_permits:
            self._add(permit.job, permit.nodes)
            self._keeps[permit.job] = permit.keep

    def apply(self, effect: RuntimeEffect) -> None:
        match effect:
            case GrantPermit(job=job, nodes=nodes) | WidenPermit(job=job, nodes=nodes):
                self._add(job, nodes)
            case NarrowPhase(job=job, keep=keep):
                self._keeps[job] = keep
            case FreeNodes(job=job, nodes=nodes):
                kept = self._keeps.get(job, ())
                self._remove(job, [node for node in nodes if node not in kept])
            case EndPermit(job=job):
                self._remove(job, list(self._on))
                self._keeps.pop(job, None)
            case _:
                pass

    def before(self, job: JobId, nodes: Iterable[NodeId]) -> set[JobId]:
        """Others on these nodes."""
        found = (self._on.get(node, set()) for node in nodes)
        return set[JobId]().union(*found) - {job}

    def _add(self, job: JobId, nodes: Iterable[NodeId]) -> None:
        for node in nodes:
            self._on.setdefault(node, set()).add(job)

    def _remove(self, job: JobId, nodes: Iterable[NodeId]) -> None:
        for node in nodes:
            jobs = self._on.get(node, set())
            jobs.discard(job)
            if not jobs:
                self._on.pop(node, None)


class PermitHistory:
    def __init__(self, job: JobId) -> None:
        self.summaries: dict[PhaseKind, PermitSummary] = {}
        self._job = job
        self._holders = NodeHolders()
        self._kind: PhaseKind | None = None
        self._ticket = 0
        self._awaits: tuple[NodeId, ...] = ()
        self._asked_s: float | None = None
        self._looked_s: float | None = None
        """Time up to which the waits for jobs before it are counted."""
        self._behind_s: dict[JobId, float] = {}
        self._granted_s: float | None = None
        self._last_s = float("-inf")
        self._counts = True
        """Whether the current line lies in the requested time."""

    def begin(
        self, job_permits: Iterable[JobPermit], own: JobPermit | None, now: JournalMoment
    ) -> None:
        """A process or a file begins with these records of the permits."""
        self._holders.begin(job_permits)
        if now.t_s < self._last_s:
            # Another clock, after a reboot: nothing that went on can be measured.
            self._asked_s = None
        if own is None or own.kind is None:
            self._kind = self._asked_s = self._granted_s = None
            return
        self._kind, self._ticket, self._awaits = own.kind, own.ticket, own.awaits
        self._granted_s = own.started_s if own.holding else None
        if self._asked_s is None and not own.holding and own.last_call_s is not None:
            # Since when its worker asks is in no record.
            self._ask(now)

    def request(self, kind: PhaseKind, now: JournalMoment) -> None:
        """A worker of the job asks for its permit, perhaps again."""
        if self._granted_s is None and (self._asked_s is None or kind is not self._kind):
            self._kind = kind
            self._ask(now)

    def read(
        self, effects: Iterable[RuntimeEffect], now: JournalMoment, *, cause: str, counts: bool
    ) -> Iterator[HistoryEntry]:
        """`cause` is what ended a permit where its effect does not know better."""
        self._counts, self._last_s = counts, now.t_s
        for effect in effects:
            if effect.job == self._job:
                yield from self._own(effect, now, cause)
            if isinstance(effect, GrantPermit | WidenPermit | FreeNodes | EndPermit | NarrowPhase):
                self._look(now)
                self._holders.apply(effect)

    def _ask(self, now: JournalMoment) -> None:
        self._asked_s = self._looked_s = now.t_s
        self._behind_s.clear()

    def _look(self, now: JournalMoment) -> None:
        """Adds the time since the last look to every job on the awaited nodes."""
        if self._looked_s is None or self._asked_s is None:
            return
        passed_s = now.t_s - self._looked_s
        for other in self._holders.before(self._job, self._awaits):
            self._behind_s[other] = self._behind_s.get(other, 0.0) + passed_s
        self._looked_s = now.t_s

    def _own(self, effect: RuntimeEffect, now: JournalMoment, cause: str) -> Iterator[HistoryEntry]:
        match effect:
            case EnqueuePhase():
                self._look(now)
                if effect.ticket != self._ticket and effect.kind is not self._kind:
                    self._asked_s = None
                self._kind, self._ticket, self._awaits = effect.kind, effect.ticket, effect.nodes
            case DropPlace():
                self._asked_s, self._awaits = None, ()
            case GrantPermit():
                yield self._granted(effect, now)
            case WidenPermit():
                yield self._happened(
                    now, EventKind.WIDENED, f"gets {nodes_in_words(effect.nodes)} too"
                )
            case NarrowPhase():
                where = nodes_in_words(effect.keep, effect.accelerators) or "none of its nodes"
                words = f"asked to bring its tail together on {where}: {effect.reason}"
                yield self._happened(now, EventKind.NARROWED, words)
            case FreeNodes():
                words = f"its tail has left {nodes_in_words(effect.nodes)}, or a part of each"
                yield self._happened(now, EventKind.FREED, words)
            case UnloadNodes():
                where = nodes_in_words(effect.nodes)
                words = f"asked to take its state off {where}: another job is to start there"
                yield self._happened(now, EventKind.UNLOADED, words)
            case WarnHolder():
                yield self._happened(now, EventKind.WARNED, f"warned: {effect.reason}")
            case RevokePermit():
                words = f"revoked: must end within {seconds(effect.grace_s)}: {effect.reason}"
                yield self._happened(now, EventKind.REVOKED, words)
            case EndPermit():
                yield self._ended(effect, now, cause)
            case _:
                pass

    def _granted(self, grant: GrantPermit, now: JournalMoment) -> HistoryEntry:
        self._look(now)
        waited_s = 0.0 if self._asked_s is None else now.t_s - self._asked_s
        behind = {job: spent_s for job, spent_s in self._behind_s.items() if spent_s > 0.0}
        self._asked_s, self._granted_s, self._kind = None, now.t_s, grant.kind
        self._behind_s.clear()
        if self._counts:
            summary = self._summary(grant.kind)
            summary.waits_s.append(waited_s)
            for job, spent_s in behind.items():
                summary.behind_s[job] = summary.behind_s.get(job, 0.0) + spent_s
        where = nodes_in_words(grant.nodes, grant.accelerators) or "no nodes"
        words = f"{grant.kind} begins on {where}, after {seconds(waited_s)} of waiting"
        return HistoryEntry(at=now.at, kind=EventKind.GRANTED, text=words + behind_in_words(behind))

    def _ended(self, end: EndPermit, now: JournalMoment, cause: str) -> HistoryEntry:
        held_s = 0.0 if self._granted_s is None else now.t_s - self._granted_s
        began, self._granted_s = self._granted_s, None
        if self._counts:
            summary = self._summary(end.kind)
            summary.ended[end.ended] = summary.ended.get(end.ended, 0) + 1
            if end.ended is PermitEndReason.DONE and began is not None:
                summary.held_s.append(held_s)
                summary.solo_s.append(end.solo_s)
        long = "" if began is None else f" after {seconds(held_s)}"
        if end.ended is PermitEndReason.DONE:
            words = f"{end.kind} is done{long}; alone it would have taken {seconds(end.solo_s)}"
            return HistoryEntry(at=now.at, kind=EventKind.DONE, text=words)
        why = cause or end.reason
        words = f"its {end.kind} permit ended{long}, {end.ended}: {why}"
        return HistoryEntry(at=now.at, kind=EventKind.LOST, text=words)

    def _happened(self, now: JournalMoment, kind: EventKind, text: str) -> HistoryEntry:
        if self._counts and self._kind is not None:
            happened = self._summary(self._kind).happened
            happened[kind] = happened.get(kind, 0) + 1
        return HistoryEntry(at=now.at, kind=kind, text=text)

    def _summary(self, kind: PhaseKind) -> PermitSummary:
        return self.summaries.setdefault(kind, PermitSummary(kind=kind))


def behind_in_words(behind_s: dict[JobId, float]) -> str:
    """The jobs waited for, after a comma; empty without any."""
    most = sorted(behind_s.items(), key=lambda one: (-one[1], one[0]))
    if not most:
        return ""
    named = ", ".join(f"{job} ({seconds(spent_s)})" for job, spent_s in most[:_SHOWN])
    more = f" and {len(most) - _SHOWN} more" if len(most) > _SHOWN else ""
    return f", behind {named}{more}"
