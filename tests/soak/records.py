"""Records of a soak: one JSON line each, made by the harness and by clients, never by a product.

The judge reads nothing else, except for the agent's audit, which is copied here line by line. Times
are seconds of CLOCK_MONOTONIC, which the agent's audit shares.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from harvester.contracts.audit import AuditEvent

R = TypeVar("R")


class SoakRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    pass


class PieceBegun(SoakRecord, tag="piece"):
    at_s: float
    seed: int
    every_s: float
    wall: str
    machine: str
    documented: tuple[int, ...]
    """Statuses that the gateway's OpenAPI document gives for a turn."""


class PieceEnded(SoakRecord, tag="ended"):
    at_s: float
    asked_by: str
    """`time`, or the signal that ended the piece."""
    left: tuple[str, ...] = ()
    """Processes, files of shared memory and pages that were still there."""


class FaultStruck(SoakRecord, tag="fault"):
    name: str
    since_s: float
    until_s: float
    """The harness has lifted it, and has started again what it had stopped itself."""
    recover_s: float
    """Longest time after `until_s` until the guest's tokens grow again."""
    skipped: str = ""
    """Why it did not strike."""
    failed: str = ""
    """Which part of what the fault demands of the product did not come true."""


class Stopped(SoakRecord, tag="stopped"):
    """A time in which an order to stop was in force, by the word of whoever gave it."""

    order: str
    source: str
    since_s: float
    until_s: float
    grants_close: bool = True
    """False where grants stay until the lease ends, and only new leases are refused."""


class Struck(SoakRecord, tag="struck"):
    """A signal that the harness sent to a process of a part."""

    part: str
    pid: int
    signal: int
    at_s: float


class Life(SoakRecord, tag="life"):
    """One process of a part, from its start until its end or the piece's."""

    part: str
    pid: int
    since_s: float
    ready_s: float | None
    """Its first answer."""
    until_s: float
    status: int | None
    """None: it is not known."""
    asked: bool = False
    """The piece's end asked it to end."""
    changed: tuple[str, ...] = ()
    """Kernel attributes that others changed: nice, class, cores, control groups, OOM score."""


class ProductionAnswer(SoakRecord, tag="production"):
    due_s: float
    ended_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float | None
    itl_s: tuple[float, ...] = ()
    error: str = ""


class TurnAttempt(SoakRecord, tag="attempt"):
    """One HTTP request for a turn, which did not bring the turn's answer."""

    trajectory: str
    turn: int
    sent_s: float
    ended_s: float
    status: int
    """0: no reply."""
    error: str
    received: tuple[int, ...] = ()
    """Tokens of its stream, before it broke."""


class TurnAnswer(SoakRecord, tag="turn"):
    """The one answer to a turn of a trajectory."""

    trajectory: str
    turn: int
    asked_s: float
    """When its first attempt was sent."""
    sent_s: float
    ended_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    minimum_version: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[tuple[int, int, int, str], ...] = ()
    """Start, end, version, engine."""
    finish_reason: str = ""
    fault: str = ""
    repeated: tuple[int, ...] | None = None
    """Tokens of the reply to the same request, sent once more after its answer."""


class TurnLost(SoakRecord, tag="lost"):
    trajectory: str
    turn: int
    asked_s: float
    ended_s: float
    error: str


class TrajectoryEnded(SoakRecord, tag="trajectory"):
    trajectory: str
    at_s: float
    complete: bool
    """False where the piece ended before its last turn was sent."""


class VersionMade(SoakRecord, tag="version"):
    """A version that a publisher made durable, by its own word or, where it was killed, by the
    store's."""

    version: int
    state_hash: str
    begun_s: float
    durable_s: float
    killed: bool = False


class VersionServed(SoakRecord, tag="served"):
    """The weights that an engine's workers held at the end of the piece."""

    engine: str
    version: int
    state_hash: str
    at_s: float


class GrantSpan(SoakRecord, tag="grant"):
    """Grants that followed each other with the same epoch and mode, as a reader copied them."""

    epoch: int
    mode: str
    reason: str
    withheld: bool
    first_s: float
    """Stamp of the first."""
    last_s: float
    """Stamp of the last."""
    expires_s: float


class LendingSample(SoakRecord, tag="lending"):
    at_s: float
    tokens_total: int | None
    """None without a guest's page."""
    foreign_ratio: float
    """Share of the machine's cores that programs other than the soak's took since the last one."""


class MemorySample(SoakRecord, tag="memory"):
    part: str
    pid: int
    at_s: float
    age_s: float
    rss_bytes: int
    fds: int


class DiskSample(SoakRecord, tag="disk"):
    folder: str
    at_s: float
    bytes: int


class Audited(SoakRecord, tag="audit"):
    event: AuditEvent


class Note(SoakRecord, tag="note"):
    """An operator's act of the harness, or something that it could not do."""

    at_s: float
    text: str


AnyRecord = (
    PieceBegun
    | PieceEnded
    | FaultStruck
    | Stopped
    | Struck
    | Life
    | ProductionAnswer
    | TurnAttempt
    | TurnAnswer
    | TurnLost
    | TrajectoryEnded
    | VersionMade
    | VersionServed
    | GrantSpan
    | LendingSample
    | MemorySample
    | DiskSample
    | Audited
    | Note
)
Sink = Callable[[SoakRecord], None]


class RecordFile:
    """Appends records; each is a line as soon as it is made, so that a killed piece counts."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()

    def __call__(self, record: SoakRecord) -> None:
        self._file.write(self._encoder.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> Iterator[SoakRecord]:
    """All whole lines of a piece; the last one of a killed harness may be torn."""
    decoder = msgspec.json.Decoder(AnyRecord)
    lines = path.read_bytes().split(b"\n")
    for line in lines[:-1]:
        yield decoder.decode(line)


def of_kind(records: Iterable[SoakRecord], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]
