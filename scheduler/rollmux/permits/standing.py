"""How one job stands: waiting, with a permit or neither; and a permit's life as a table."""

from enum import StrEnum

import msgspec

from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.permits.completion import CompletionCurve, Course
from scheduler.rollmux.permits.events import EndReason
from scheduler.rollmux.permits.longest_run import LongestRun
from scheduler.rollmux.permits.terms import JobTerms

NO_EPOCH = Epoch(0)


class Stage(StrEnum):
    APART = "apart"
    """Neither waits nor runs: new, failed, or doing what needs no node."""
    WAITING = "waiting"
    RUNNING = "running"
    NARROWING = "narrowing"
    """Was asked to bring its tail together; still holds all of its nodes."""
    TAILING = "tailing"
    """Runs on what it kept; the rest is given to others."""
    REVOKED = "revoked"
    """Was told to end; the grace runs."""


class Trigger(StrEnum):
    ENQUEUED = "enqueued"
    GRANTED = "granted"
    ASKED_TO_NARROW = "asked_to_narrow"
    NARROWED = "narrowed"
    RECALLED = "recalled"
    """All nodes that its tail had left are its again."""
    REVOKED = "revoked"
    ENDED = "ended"


# A pair that is not here changes nothing.
TRANSITIONS: dict[tuple[Stage, Trigger], Stage] = {
    (Stage.APART, Trigger.ENQUEUED): Stage.WAITING,
    (Stage.WAITING, Trigger.ENQUEUED): Stage.WAITING,
    (Stage.WAITING, Trigger.GRANTED): Stage.RUNNING,
    (Stage.WAITING, Trigger.ENDED): Stage.APART,
    (Stage.RUNNING, Trigger.ASKED_TO_NARROW): Stage.NARROWING,
    (Stage.RUNNING, Trigger.REVOKED): Stage.REVOKED,
    (Stage.RUNNING, Trigger.ENDED): Stage.APART,
    (Stage.NARROWING, Trigger.NARROWED): Stage.TAILING,
    (Stage.NARROWING, Trigger.REVOKED): Stage.REVOKED,
    (Stage.NARROWING, Trigger.ENDED): Stage.APART,
    (Stage.TAILING, Trigger.RECALLED): Stage.RUNNING,
    (Stage.TAILING, Trigger.REVOKED): Stage.REVOKED,
    (Stage.TAILING, Trigger.ENDED): Stage.APART,
    (Stage.REVOKED, Trigger.ENDED): Stage.APART,
}

HOLDING = frozenset({Stage.RUNNING, Stage.NARROWING, Stage.TAILING, Stage.REVOKED})


class Standing(msgspec.Struct, kw_only=True):
    """One job's record: what a restart must know of it. The policy's to change."""

    terms: JobTerms
    stage: Stage = Stage.APART
    kind: PhaseKind | None = None
    """Of the phase that it waits for or runs."""
    ticket: int = 0
    """Its place in every line of that phase; lower is earlier."""
    holder: str = ""
    epoch: Epoch = NO_EPOCH
    nodes: tuple[NodeId, ...] = ()
    """Held now."""
    awaits: tuple[NodeId, ...] = ()
    """In whose lines it stands; with a permit, those that it would be widened by."""
    accelerators: dict[NodeId, tuple[int, ...]] = {}
    """By number, of the nodes that it holds in part: from 0 on a tail's, else those that a tail of
    another leaves."""
    keep: tuple[NodeId, ...] = ()
    """What a tail was asked to keep."""
    keep_accelerators: dict[NodeId, tuple[int, ...]] = {}
    """Of those nodes of which it is to keep a part."""
    enqueued_s: float = 0.0
    heard_s: float | None = None
    """When its worker last asked, or its holder last spoke; None: not since it was enqueued."""
    started_s: float = 0.0
    warned_s: float | None = None
    revoked_s: float | None = None
    loaded: tuple[NodeId, ...] = ()
    """Nodes on whose accelerators its state was left, though it holds no permit for them."""
    loaded_by: str = ""
    """Which process of the job has left it there."""
    unload: tuple[NodeId, ...] = ()
    """Those that it was asked to take its state off, for another job to start there."""
    was_away: bool = False
    """The tail of this phase has been on none of its nodes, at a speed that is not known here."""
    worked_s: float = 0.0
    """What the phase would have taken alone until `worked_at_s`, loading included."""
    worked_at_s: float = 0.0
    complete_ratio: float = 0.0
    course: Course | None = None
    """How the phase that runs came that far; None: not all of it was heard."""
    curves: dict[PhaseKind, CompletionCurve] = {}
    """How its phases completed that have ended."""
    longest_runs: dict[PhaseKind, LongestRun] = {}
    """How long its phases are known to take."""
    tokens: int = 0
    ended: EndReason | None = None
    """How its latest permit ended; None while it is held."""
    failures: int = 0

    @property
    def job(self) -> JobId:
        return self.terms.job

    @property
    def holding(self) -> bool:
        return self.stage in HOLDING

    def move(self, trigger: Trigger) -> bool:
        to = TRANSITIONS.get((self.stage, trigger))
        if to is not None:
            self.stage = to
        return to is not None
