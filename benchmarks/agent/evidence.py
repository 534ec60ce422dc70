"""Evidence of a faults scenario: records made outside the agent, and its files.

Times are seconds of CLOCK_MONOTONIC (or of the scenario's virtual clock). Nothing here is a counter
of the agent's: pages are read by another reader, data and calls are noted by who made them.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from harvester.contracts.audit import AuditEvent, audit_files, read_audit
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import RoseMuxError
from harvester.contracts.journal import Decided, read_journal
from harvester.contracts.page import PAGE_BYTES, Grant, PageName
from harvester.contracts.page.seal import BODY_OFFSET, Sealed, unseal
from scheduler.sim.replay import replay_journal

SCRAPE = "scrape"
"""Stands for a slot in `GoodData`: answers of a metrics page."""
_GRANT = msgspec.msgpack.Decoder(Grant)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantSeen:
    """A grant as it stood on its page."""

    slot: str
    stamp_s: float
    expires_s: float
    seen_s: float
    grant: Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodData:
    """Data of production that may be believed from `at_s` until `until_s`."""

    slot: str
    at_s: float
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dark:
    """A time in which no grant may be open: data stale, missing or unbelievable, or an order."""

    slot: str
    cause: str
    since_s: float
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Limits that were configured from `since_s` on."""

    since_s: float
    step_tokens: int
    kv_tokens: int
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCall:
    """A call that an agent answered, whether or not its caller received the answer. `until_s` is
    the end of the lease by this answer; that of a release is its moment."""

    slot: str
    request_id: str
    epoch: int
    at_s: float
    until_s: float
    released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnServed:
    """A turn that a guest's middleware let through to its engine."""

    slot: str
    epoch: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedCall:
    """A call that must be refused; `status` 0 is a connection that the agent closed."""

    name: str
    status: int
    granted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductionFate:
    """The fate of a production stand-in. `signals`: numbers of those that others than the scenario
    sent; `status`: how it ended, 0 as it was asked to or by the scenario's own strike."""

    signals: tuple[int, ...] = ()
    status: int = 0
    changed: tuple[str, ...] = ()
    """Kernel attributes that were changed: nice, class, cores, control groups, OOM score."""
    blocked_s: float = 0.0
    """Longest time in which one write of its page waited for anything but a core."""
    connections: int = 0
    """Most connections of scrapes that were open at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A guest stand-in that ended without the scenario's doing."""

    slot: str
    pid: int
    at_s: float


@dataclass(slots=True, kw_only=True)
class Evidence:
    name: str
    tolerance_s: float = 0.0
    """Time between an event and its note."""
    lease_ttl_s: float = 10.0
    recording: bool = True
    """Whether journal and audit could be written throughout."""
    grants: list[GrantSeen] = field(default_factory=list)
    good: list[GoodData] = field(default_factory=list)
    dark: list[Dark] = field(default_factory=list)
    caps: list[Caps] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    """Starts of the agent."""
    calls: list[LeaseCall] = field(default_factory=list)
    turns: list[TurnServed] = field(default_factory=list)
    refused: list[RefusedCall] = field(default_factory=list)
    scraped: list[float] = field(default_factory=list)
    """Stamps of pulses that the agent wrote from a scrape; `good` has the answers."""
    decisions: dict[str, list[Decided]] = field(default_factory=dict)
    audit: list[AuditEvent] = field(default_factory=list)
    replay_faults: list[str] = field(default_factory=list)
    production: list[ProductionFate] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Processes and shared memory that were still there at the end."""
    agent_statuses: list[int] = field(default_factory=list)
    """Exit statuses of agents that were asked to end."""
    agent_peak_mb: float = 0.0


def grant_on(page: bytes, slot: str, *, seen_s: float) -> GrantSeen | None:
    """The grant of a copied page however old; None if it is no whole one."""
    stamp_ns = int.from_bytes(page[BODY_OFFSET : BODY_OFFSET + 8], "little")
    sealed = unseal(page, kind=Grant.KIND, now_ns=stamp_ns - 1)
    if not isinstance(sealed, Sealed):
        return None
    return GrantSeen(
        slot=slot,
        stamp_s=sealed.stamp_ns * 1e-9,
        expires_s=sealed.expires_ns * 1e-9,
        seen_s=seen_s,
        grant=_GRANT.decode(sealed.record),
    )


class GrantLog:
    """Watches grant pages from a thread, with opened files of its own; each grant is noted once."""

    def __init__(self, pages: Sequence[Path], *, every_s: float = 0.01) -> None:
        self.grants: list[GrantSeen] = []
        self._pages = {path.name: path / PageName.GRANT for path in pages}
        self._last: dict[str, bytes] = {}
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def latest(self, slot: str) -> GrantSeen | None:
        return next((seen for seen in reversed(self.grants) if seen.slot == slot), None)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            for slot, path in self._pages.items():
                self._look(slot, path)

    def _look(self, slot: str, path: Path) -> None:
        try:
            page = path.read_bytes()[:PAGE_BYTES]
        except OSError:
            return
        if page != self._last.get(slot):
            self._last[slot] = page
            seen = grant_on(page, slot, seen_s=monotonic_ns() * 1e-9)
            if seen is not None:
                self.grants.append(seen)


def read_files(evidence: Evidence, state: Path, slots: Sequence[str]) -> None:
    """Adds what the agent's journals and its audit say, and the faults of a replay. Directories
    are read in the order of their content."""
    for slot in slots:
        journal = state / f"{slot}.journal"
        evidence.decisions.setdefault(slot, []).extend(_decisions_of(journal))
        if not journal.exists():
            continue  # A slot that was gone when its directory was new. Grants miss their lines.
        try:
            difference = replay_journal(journal).difference
        except RoseMuxError as error:
            evidence.replay_faults.append(f"{slot}: {error}")
        else:
            if difference is not None:
                evidence.replay_faults.append(f"{slot}: line {difference.line} differs")
    lines = (line for file in audit_files(state / "audit.jsonl") for line in read_audit(file))
    evidence.audit += [line for line in lines if isinstance(line, AuditEvent)]


def _decisions_of(journal: Path) -> list[Decided]:
    older = journal.with_name(journal.name + ".1")
    return [
        line
        for path in (older, journal)
        if path.exists()
        for line in read_journal(path)
        if isinstance(line, Decided)
    ]


def plain(record: Any) -> Any:
    """A record as a journal's reader gets it."""
    return msgspec.json.decode(msgspec.json.encode(record, enc_hook=str))
