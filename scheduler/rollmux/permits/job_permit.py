"""State of one job: waiting, with a permit or neither; and a permit's life as a table.

A phase works at the share of its accelerators that it holds; its tail needs only the share that it
keeps, and what moved tails lose there is learned (tail_room.py). So a scheduler that sees permits
only knows what a phase would have taken alone.
"""

from enum import StrEnum

import msgspec

from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.permits.completion import (
    CompletionCurve,
    ProgressTimes,
    TailMove,
    tail_of,
)
from scheduler.rollmux.permits.events import PermitEndReason
from scheduler.rollmux.permits.longest_run import LongestRun
from scheduler.rollmux.permits.terms import JobTerms, PhaseTerms

NO_EPOCH = Epoch(0)


class PermitStage(StrEnum):
    APART = "apart"
    """The job is new or failed, or its phase needs no node."""
    WAITING = "waiting"
    RUNNING = "running"
    NARROWING = "narrowing"
    """Was asked to bring its tail together; still holds all of its nodes."""
    TAILING = "tailing"
    """Runs on the kept part; other jobs use the rest."""
    REVOKED = "revoked"
    """Was asked to end; the grace period runs."""

    @property
    def is_whole(self) -> bool:
        """Whether a phase that ends here may leave its state loaded.

        A tail has its nodes in part, and leaves that part to the job that has the rest.
        """
        return self in (PermitStage.RUNNING, PermitStage.NARROWING)


class PermitTrigger(StrEnum):
    ENQUEUED = "enqueued"
    GRANTED = "granted"
    ASKED_TO_NARROW = "asked_to_narrow"
    NARROWED = "narrowed"
    RECALLED = "recalled"
    """All nodes that its tail had left are its again."""
    REVOKED = "revoked"
    ENDED = "ended"


# A pair that is not here changes nothing.
TRANSITIONS: dict[tuple[PermitStage, PermitTrigger], PermitStage] = {
    (PermitStage.APART, PermitTrigger.ENQUEUED): PermitStage.WAITING,
    (PermitStage.WAITING, PermitTrigger.ENQUEUED): PermitStage.WAITING,
    (PermitStage.WAITING, PermitTrigger.GRANTED): PermitStage.RUNNING,
    (PermitStage.WAITING, PermitTrigger.ENDED): PermitStage.APART,
    (PermitStage.RUNNING, PermitTrigger.ASKED_TO_NARROW): PermitStage.NARROWING,
    (PermitStage.RUNNING, PermitTrigger.REVOKED): PermitStage.REVOKED,
    (PermitStage.RUNNING, PermitTrigger.ENDED): PermitStage.APART,
    (PermitStage.NARROWING, PermitTrigger.NARROWED): PermitStage.TAILING,
    (PermitStage.NARROWING, PermitTrigger.REVOKED): PermitStage.REVOKED,
    (PermitStage.NARROWING, PermitTrigger.ENDED): PermitStage.APART,
    (PermitStage.TAILING, PermitTrigger.RECALLED): PermitStage.RUNNING,
    (PermitStage.TAILING, PermitTrigger.REVOKED): PermitStage.REVOKED,
    (PermitStage.TAILING, PermitTrigger.ENDED): PermitStage.APART,
    (PermitStage.REVOKED, PermitTrigger.ENDED): PermitStage.APART,
}

HOLDING = frozenset(
    {PermitStage.RUNNING, PermitStage.NARROWING, PermitStage.TAILING, PermitStage.REVOKED}
)


class JobPermit(msgspec.Struct, kw_only=True):
    """One job's record, which a restart restores. Only the policy changes it."""

    terms: JobTerms
    stage: PermitStage = PermitStage.APART
    kind: PhaseKind | None = None
    """Kind of the phase that it waits for or runs."""
    ticket: int = 0
    """The job's place in every line of the phase; lower is earlier."""
    holder: str = ""
    epoch: Epoch = NO_EPOCH
    nodes: tuple[NodeId, ...] = ()
    """Nodes held now."""
    awaits: tuple[NodeId, ...] = ()
    """Nodes in whose lines the job waits; with a permit, nodes that may widen it."""
    accelerators: dict[NodeId, tuple[int, ...]] = {}
    """Accelerator numbers of partly held nodes: from 0 on for a tail, else the ones beside another
    job's tail."""
    keep: tuple[NodeId, ...] = ()
    """Nodes that the tail was asked to keep."""
    keep_accelerators: dict[NodeId, tuple[int, ...]] = {}
    """Accelerator numbers of the partly kept nodes."""
    enqueued_s: float = 0.0
    last_call_s: float | None = None
    """Time of the worker's last request or the holder's last beat; None before the first."""
    started_s: float = 0.0
    warned_s: float | None = None
    revoked_s: float | None = None
    loaded: tuple[NodeId, ...] = ()
    """Nodes on whose accelerators its state was left without a permit."""
    loaded_by: str = ""
    """Process of the job that left it there; empty once all has been unloaded."""
    unload: tuple[NodeId, ...] = ()
    """Nodes that it was asked to take its state off, for another job to start there."""
    was_away: bool = False
    """The tail of this phase has run on none of its nodes, at a speed not known here."""
    worked_s: float = 0.0
    """Duration of the phase's work until `worked_at_s`, alone and with loading, in s."""
    worked_at_s: float = 0.0
    load_s: float = 0.0
    """Time of the running phase that loading may take beyond its bound."""
    complete_ratio: float = 0.0
    course: ProgressTimes | None = None
    """Progress of the running phase; None if a part was not observed."""
    tail: TailMove | None = None
    """The running phase's tail, once it was asked to leave a part of its nodes."""
    curves: dict[PhaseKind, CompletionCurve] = {}
    """Completion curves of its ended phases."""
    longest_runs: dict[PhaseKind, LongestRun] = {}
    """Longest known runs of its phases."""
    tokens: int = 0
    ended: PermitEndReason | None = None
    """End of its latest permit; None while it is held."""
    failures: int = 0

    @property
    def job(self) -> JobId:
        return self.terms.job

    @property
    def phase(self) -> PhaseTerms | None:
        """Terms of the phase that the job waits for or runs; None if the job's terms dropped it."""
        return None if self.kind is None else self.terms.phase(self.kind)

    @property
    def holding(self) -> bool:
        return self.stage in HOLDING

    @property
    def claimed(self) -> bool:
        """Whether a worker has asked for the permit that the job waits for."""
        return self.stage is PermitStage.WAITING and self.last_call_s is not None

    @property
    def warned(self) -> bool:
        """Whether its holder was warned that the phase takes longer than its bound."""
        return self.warned_s is not None

    @property
    def in_tail(self) -> bool:
        """Whether the completed share has reached the start of its phase's tail."""
        phase = self.phase
        if phase is None:
            return False
        ratio, _ = tail_of(phase, self.curves.get(phase.kind))
        return ratio < 1.0 and self.complete_ratio >= ratio

    @property
    def speed(self) -> float:
        """Seconds that the phase would have taken alone, in one second as its permit is now."""
        parts = self.accelerators
        if (not parts and not self.awaits) or self.stage is PermitStage.TAILING:
            return 1.0
        phase = self.phase
        if phase is None or self.in_tail:
            return 1.0
        each = phase.accelerators
        held = sum(len(parts[node]) if node in parts else each for node in self.nodes)
        return held / phase.all_accelerators

    def work_until(self, now: float) -> None:
        """Brings `worked_s` up to now; before anything changes that its speed depends on."""
        passed_s = max(0.0, now - self.worked_at_s)
        self.worked_s += passed_s * self.speed
        self.worked_at_s = now

    def move(self, trigger: PermitTrigger) -> bool:
        to = TRANSITIONS.get((self.stage, trigger))
        if to is not None:
            self.stage = to
        return to is not None
