"""Decides where a rollout runs: on the job's own engines and on leases, its tail on leases alone.

    permit                                 ->  own engines and leases
    asked to make room, a guest serves     ->  own engines off, then the permit narrowed to no node
    the nodes are free again               ->  back onto them
    no guest serves, or makes a token      ->  back in line for them: no promise rests on a lease
    permit lost, or the phase has ended    ->  neither

Sets the switches, which the shell keeps at the gateway, and returns requests about the permit.
Reads no clock.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from scheduler.rollmux.permits.events import Recall
from scheduler.rollmux.permits.job_permit import PermitStage

GONE_S: Final = 3.0
"""Time without a serving guest after which the tail goes home: brief load may cut a lease."""
STARVED_S: Final = 10.0
"""A guest that has turns and makes no token for longer counts as gone, although leased."""
RECALL_S: Final = 0.25
"""Period of requests for free nodes, in s: each is an event in the control's journal."""

BULK_RATIO: Final = 0.8
"""Completed share up to which a rollout is bound by throughput; then by its longest responses."""
LEASED_MOST_RATIO: Final = 0.9
"""Cap on the leased share: beyond it the own nodes' output says little about their speed alone."""


class TailState(StrEnum):
    HOME = "home"
    LEAVING = "leaving"
    """The gateway has the order that the own engines are off, and has not confirmed it."""
    AWAY = "away"
    IN_LINE = "in_line"
    """The tail waits in line for its nodes, and runs on leases while there are any."""
    ENDED = "ended"


class TailEvent(StrEnum):
    MAY_LEAVE = "may_leave"
    """The permit asks for room, and a guest serves the job."""
    ENGINES_OFF = "engines_off"
    STAYED = "stayed"
    """The gateway did not confirm it in time."""
    NODES_BACK = "nodes_back"
    LEASE_GONE = "lease_gone"
    """No guest has served for `GONE_S`, or made a token of its turns for `STARVED_S`."""
    PERMIT_LOST = "permit_lost"


# A pair that is not here changes nothing.
TRANSITIONS: Final[dict[tuple[TailState, TailEvent], TailState]] = {
    (TailState.HOME, TailEvent.MAY_LEAVE): TailState.LEAVING,
    (TailState.LEAVING, TailEvent.ENGINES_OFF): TailState.AWAY,
    (TailState.LEAVING, TailEvent.STAYED): TailState.HOME,
    (TailState.AWAY, TailEvent.NODES_BACK): TailState.HOME,
    (TailState.AWAY, TailEvent.LEASE_GONE): TailState.IN_LINE,
    (TailState.IN_LINE, TailEvent.NODES_BACK): TailState.HOME,
} | {(state, TailEvent.PERMIT_LOST): TailState.ENDED for state in TailState}


class EngineSwitches(NamedTuple):
    """The job's two switches at its gateway."""

    dedicated: bool
    harvesting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TailSample:
    stage: PermitStage = PermitStage.RUNNING
    """Stage of the permit."""
    may_leave: bool = False
    """The permit is to be narrowed to no node, and its turns may do without."""
    lost: bool = False
    """The permit has ended."""
    guest_serves: bool = False
    """A leased guest serves the job now; False where the gateway does not answer."""
    guest_busy: bool = False
    """Whether a guest has turns of the job."""
    guest_tokens: int = 0
    """Number of tokens that guests have generated for the job."""
    engines_off: bool = False
    """The gateway confirmed that no turn of the job is on its own engines."""


@dataclass(frozen=True, slots=True)
class ReportNarrowed:
    """Report to the control that the nodes are empty."""


@dataclass(frozen=True, slots=True)
class RecallTail:
    how: Recall


TailEffect = ReportNarrowed | RecallTail


class TailEnd(StrEnum):
    FINISHED = "finished"
    """The rollout ended on leases."""
    RETURNED = "returned"
    """The job's nodes were free again."""
    LEASE_LOST = "lease_lost"
    """The job became first in line."""
    PERMIT_LOST = "permit_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """One absence of a tail from its nodes."""

    seconds: float
    """Length of the absence, in s."""
    in_line_s: float = 0.0
    """Part of the time away, in s, after the tail lost its leases."""
    end: TailEnd


def taken_off_s(bulk_s: float, *, leased_ratio: float) -> float:
    """The time that leases have taken off a rollout: off its bulk, which is bound by throughput.

    The bulk took `bulk_s`, and guests made `leased_ratio` of its tokens.
    """
    ratio = min(leased_ratio, LEASED_MOST_RATIO)
    return max(0.0, bulk_s) * ratio / (1.0 - ratio)


class LeasedTail:
    """Controls the tail of one permit. `tails` are the ended ones."""

    def __init__(self, *, leases: bool) -> None:
        """`leases`: False if the job's group does not allow them; its tail then stays."""
        self.state = TailState.HOME
        self.tails: list[Tail] = []
        self._leases = leases
        self._since_s = 0.0
        """Start of the time away; while leaving, time of the decision."""
        self._served_s = 0.0
        """Time at which a guest was last seen serving."""
        self._made = (0.0, 0)
        """Time at which a guest last made tokens or had no turn, and its tokens by then."""
        self._in_line_since_s = 0.0
        self._asked_s = float("-inf")

    @property
    def switches(self) -> EngineSwitches:
        ended = self.state is TailState.ENDED
        return EngineSwitches(
            dedicated=self.state is TailState.HOME, harvesting=self._leases and not ended
        )

    def observe(self, sample: TailSample, *, now: float) -> tuple[TailEffect, ...]:
        if sample.guest_serves:
            self._served_s = now
        if not sample.guest_busy or sample.guest_tokens != self._made[1]:
            self._made = (now, sample.guest_tokens)
        if sample.lost:
            self._move(TailEvent.PERMIT_LOST, now)
            return ()
        match self.state:
            case TailState.HOME if sample.may_leave and sample.guest_serves and self._leases:
                self._move(TailEvent.MAY_LEAVE, now)
            case TailState.LEAVING if sample.engines_off:
                self._move(TailEvent.ENGINES_OFF, now)
            case TailState.LEAVING if now - self._since_s > GONE_S:
                self._move(TailEvent.STAYED, now)
            case TailState.AWAY | TailState.IN_LINE if sample.stage is PermitStage.RUNNING:
                self._move(TailEvent.NODES_BACK, now)
            case TailState.AWAY if self._is_gone(now):
                self._move(TailEvent.LEASE_GONE, now)
        return self._requests(sample.stage, now)

    def _is_gone(self, now: float) -> bool:
        starves = now - max(self._made[0], self._since_s) > STARVED_S
        return starves or now - self._served_s > GONE_S

    def end(self, *, now: float) -> None:
        """The rollout is done."""
        self._ended(TailEnd.FINISHED, now)
        self.state = TailState.ENDED

    def _requests(self, stage: PermitStage, now: float) -> tuple[TailEffect, ...]:
        """Requests to the control, repeated until the permit's stage shows that they arrived."""
        if self.state not in (TailState.AWAY, TailState.IN_LINE) or now - self._asked_s < RECALL_S:
            return ()
        self._asked_s = now
        if stage is PermitStage.NARROWING:
            return (ReportNarrowed(),)
        if stage is not PermitStage.TAILING:
            return ()
        return (RecallTail(Recall.WHEN_FREE if self.state is TailState.AWAY else Recall.IN_LINE),)

    def _move(self, event: TailEvent, now: float) -> None:
        to = TRANSITIONS[self.state, event]
        if event is TailEvent.NODES_BACK:
            at_once = self.state is TailState.AWAY
            self._ended(TailEnd.RETURNED if at_once else TailEnd.LEASE_LOST, now)
        elif event is TailEvent.PERMIT_LOST:
            self._ended(TailEnd.PERMIT_LOST, now)
        elif to in (TailState.LEAVING, TailState.AWAY):
            self._since_s = now
        elif to is TailState.IN_LINE:
            self._in_line_since_s = now
        self.state, self._asked_s = to, float("-inf")

    def _ended(self, end: TailEnd, now: float) -> None:
        if self.state in (TailState.AWAY, TailState.IN_LINE):
            waits = self.state is TailState.IN_LINE
            in_line_s = now - self._in_line_since_s if waits else 0.0
            self.tails.append(Tail(seconds=now - self._since_s, in_line_s=in_line_s, end=end))
