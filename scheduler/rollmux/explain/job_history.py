"""One job's history from the journal: its placements, the reasons of its moves, its permits.

It reads every line of a journal and returns entries in order of time; it keeps only the state that
the next line needs.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import msgspec

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import JobSpec, Placement
from scheduler.rollmux.cluster.runtime_events import (
    CloseJob,
    NodeReport,
    OrderMove,
    PlanJob,
    QueueJob,
    RuntimeEffect,
    RuntimeEvent,
    SettleJob,
    Submit,
)
from scheduler.rollmux.explain.history_entry import EventKind, HistoryEntry, seconds
from scheduler.rollmux.explain.journal_lines import Began, Dated, JournalMoment
from scheduler.rollmux.explain.permit_history import PermitHistory
from scheduler.rollmux.permits.events import (
    ControlResumed,
    DropPlace,
    Enter,
    Forget,
    Register,
    Withdraw,
)
from scheduler.rollmux.permits.job_permit import JobPermit
from scheduler.rollmux.permits.terms import JobTerms, terms_changes, terms_fault
from scheduler.rollmux.planner.group_effects import PlacementDecision

_CAUSES: Final = frozenset(
    {"submit", "register", "forget", "withdraw", "node", "control_resumed", "enter"}
)
"""Samples that a history needs beside what follows from them."""


class JobHistory:
    def __init__(self, job: JobId, *, since: datetime) -> None:
        """Follows events before `since` without reporting them."""
        self.permits = PermitHistory(job)
        self.is_known = self.was_known = False
        self._job = job
        self._terms: JobTerms | None = None
        self._since = since
        self._first = True
        self._new_process = False
        self._queued_for = ""

    def read(self, line: Began | Dated) -> Iterator[HistoryEntry]:
        for entry in self._began(line) if isinstance(line, Began) else self._decided(line):
            if entry.at >= self._since:
                yield entry
        self.was_known |= self.is_known

    def _began(self, line: Began) -> Iterator[HistoryEntry]:
        snapshot = line.snapshot or {}
        raw = snapshot.get("permits", snapshot).get("jobs", ())
        job_permits = [one for each in raw if (one := _converted(each, JobPermit)) is not None]
        own = next((one for one in job_permits if one.job == self._job), None)
        self.permits.begin(job_permits, own, line.moment)
        self._new_process = True
        planned = snapshot.get("plan", {}).get("jobs", ())
        is_planned = any(one["placed"]["spec"]["job"] == self._job for one in planned)
        if not is_planned:
            self._terms = None if own is None else own.terms
        was_known, self.is_known = self.is_known, is_planned or own is not None
        if line.missing and was_known:
            words = f"{line.missing} decisions before this could not be written to the journal"
            yield HistoryEntry(at=line.moment.at, kind=EventKind.JOURNAL, text=words)
        if was_known and not self.is_known:
            words = "the control started without its state and no longer knows the job"
            yield HistoryEntry(at=line.moment.at, kind=EventKind.CONTROL, text=words)
        elif self.is_known and self._first:
            words = f"the journal begins; the job is there already{_where(own)}"
            yield HistoryEntry(at=line.moment.at, kind=EventKind.JOURNAL, text=words)
        self._first = False

    def _decided(self, line: Dated) -> Iterator[HistoryEntry]:
        sample = line.decided.sample
        event: RuntimeEvent | None = None
        if sample.get("type") in _CAUSES:
            event = _converted(sample, RuntimeEvent)
        effects = [
            effect
            for raw in line.decided.effects
            if (effect := _converted(raw, RuntimeEffect)) is not None
        ]
        yield from self._caused(event, line.moment)
        yield from self._planned(effects, line.moment)
        yield from self.permits.read(
            effects, line.moment, cause=self._cause(event), counts=line.moment.at >= self._since
        )
        yield from self._closed(event, effects, line.moment)
        self._new_process = False

    def _caused(self, event: RuntimeEvent | None, now: JournalMoment) -> Iterator[HistoryEntry]:
        match event:
            case Submit(spec=given) if given.job == self._job and not self.is_known:
                self.is_known, self._queued_for = True, ""
                yield HistoryEntry(at=now.at, kind=EventKind.SUBMITTED, text=_submitted(given))
            case Register(terms=terms) if terms.job == self._job and not terms_fault(terms):
                words = f"placed by hand on {_all_nodes(terms)}"
                if self.is_known and self._terms is not None:
                    words = f"registered with other terms: {terms_changes(self._terms, terms)}"
                self.is_known, self._terms = True, terms
                yield HistoryEntry(at=now.at, kind=EventKind.PLACED, text=words)
            case ControlResumed() if self.is_known:
                words = "the control is back" if self._new_process else "the control was paused"
                words += ": holders have a whole lease again"
                yield HistoryEntry(at=now.at, kind=EventKind.CONTROL, text=words)
            case Enter(job=job, kind=kind) if job == self._job:
                self.permits.request(kind, now)
            case _:
                pass

    def _planned(self, effects: list[RuntimeEffect], now: JournalMoment) -> Iterator[HistoryEntry]:
        own = [effect for effect in effects if effect.job == self._job]
        asked = next((one for one in own if isinstance(one, PlanJob)), None)
        for effect in own:
            match effect:
                case PlanJob():
                    yield _plan_entry(effect, now)
                case QueueJob(reason=reason) if reason != self._queued_for:
                    self._queued_for = reason
                    words = f"waits for a placement: {reason}"
                    yield HistoryEntry(at=now.at, kind=EventKind.QUEUED, text=words)
                case OrderMove():
                    words = f"iteration ended: ordered to move to {_nodes(effect)}"
                    yield HistoryEntry(at=now.at, kind=EventKind.MOVE_ORDERED, text=words)
                case SettleJob() if asked is None or _nodes(asked) != _nodes(effect):
                    words = f"is in {effect.group} on {_nodes(effect)} now"
                    yield HistoryEntry(at=now.at, kind=EventKind.ARRIVED, text=words)
                case _:
                    pass

    def _cause(self, event: RuntimeEvent | None) -> str:
        """The cause of a permit's loss, if the effect does not name it; else empty."""
        match event:
            case NodeReport(node=node, failed=True):
                return f"node {node} failed"
            case Forget(job=job) if job == self._job:
                return "the job was forgotten"
        return ""

    def _closed(
        self, event: RuntimeEvent | None, effects: list[RuntimeEffect], now: JournalMoment
    ) -> Iterator[HistoryEntry]:
        own = [effect for effect in effects if effect.job == self._job]
        close = next((one for one in own if isinstance(one, CloseJob)), None)
        gone = any(isinstance(one, DropPlace) and one.forgotten for one in own)
        if not (gone and self.is_known):
            return
        self.is_known = False
        match event:
            case Forget(job=job) if job == self._job:
                why = "it was forgotten"
            case Withdraw(job=job) if job == self._job:
                why = "its process gave up the wait for a placement"
            case _:
                why = "it was silent for too long"
        closing = "" if close is None else f"; {_closing_text(close)}"
        yield HistoryEntry(at=now.at, kind=EventKind.CLOSED, text=f"closed: {why}{closing}")


def _converted(raw: dict[str, Any], kind: Any) -> Any:
    """The typed record; None for a kind that this version does not know."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError:
        return None


def _where(permit: JobPermit | None) -> str:
    return ", without a placement" if permit is None else f", on {_all_nodes(permit.terms)}"


def _all_nodes(terms: JobTerms) -> str:
    return " ".join(dict.fromkeys(node for phase in terms.phases for node in phase.nodes))


def _submitted(given: JobSpec) -> str:
    phases = ", ".join(
        f"{one.kind} of at most {seconds(one.max_s)}"
        + (f" on {one.nodes} node{'s' * (one.nodes > 1)}" if one.nodes else "")
        for one in given.phases
    )
    return f"submitted with an SLO of {given.slo:.2f}: {phases}"


def _plan_entry(plan: PlanJob, now: JournalMoment) -> HistoryEntry:
    where = f"{plan.group} on {_nodes(plan)}"
    beside = f" beside {', '.join(plan.beside)}" if plan.beside else " alone"
    match plan.decision:
        case PlacementDecision.PLACED:
            kind, words = EventKind.PLACED, f"placed in {where}{beside}: {plan.reason}"
        case PlacementDecision.MOVED:
            words = f"asked to move to {where}{beside}, at its iteration's end: {plan.reason}"
            kind = EventKind.MOVE_REQUESTED
        case PlacementDecision.RESTARTED:
            words = f"gets other nodes, in {where}{beside}: {plan.reason}"
            kind = EventKind.RESTARTED
    return HistoryEntry(at=now.at, kind=kind, text=words)


def _nodes(of: Placement) -> str:
    return f"{_or_none(of.rollout_nodes)} | {_or_none(of.training_nodes)}"


def _or_none(nodes: tuple[NodeId, ...]) -> str:
    return " ".join(nodes) or "(no node is free)"


def _closing_text(close: CloseJob) -> str:
    kept = "kept" if close.kept else "broken"
    return (
        f"after {close.iterations} iterations and {close.moves} moves its slow-down was "
        f"{close.slowdown:.2f} of {close.slo:.2f}: its SLO was {kept}"
    )
