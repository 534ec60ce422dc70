"""One attempt that runs on an engine, and why it may be cut."""

import asyncio
import math
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.gateway.policy.course import TurnCourse
from scheduler.gateway.policy.turn import Turn

TOGETHER_S = 0.1
"""Time that tokens of a whole reply may wait to be read together, in s: a read costs as much as
several tokens."""
STREAMED_TOGETHER_S = 0.02
"""Time that tokens of a streamed reply may wait to be read together, in s. Applies only while reads
are less than `_FAST_S` apart."""
_FAST_S = 0.03
_ONE_READ_S = 0.001
"""Chunks this close came in one read, which says nothing about the pace of tokens."""


class CutReason(StrEnum):
    """Why a running attempt is ended from this side."""

    SWITCH = "switch"
    """The turn goes on at the new version."""
    END = "end"
    """The turn ends with its tokens so far."""
    SHUTDOWN = "shutdown"
    """The gateway ends, and the turn with it."""
    LEASE = "lease"
    PERMIT = "permit"
    """The node is another job's now; the turn goes on where its job may run."""
    PAUSE = "pause"
    """The job is paused; the turn goes on once it is resumed."""
    STALL = "stall"
    ENGINE = "engine"
    DOUBT = "doubt"
    """The engine does not answer; it may be alive."""
    STREAMS = "streams"
    """The engine is alive and breaks stream upon stream; no turn is to blame."""
    WEIGHTS = "weights"
    """The engine's weights were changed by another caller; no turn is to blame."""
    CLASH = "clash"
    """The engine's tokens do not agree with another engine's; it lives, and no turn is to blame."""


@dataclass(slots=True, eq=False)
class RunningAttempt:
    turn: Turn
    began_s: float
    chunk_at_s: float
    gap_s: float = math.inf
    """Time between the last two reads that brought chunks, in s."""
    course: TurnCourse = field(default_factory=TurnCourse)
    task: "asyncio.Task[None] | None" = None
    why_cut: CutReason | None = None
    paused_s: float = 0.0
    """Wait for a guest's closed gate, in s; excluded from its speed."""
    trial: str = ""
    """The suspect on trial; empty for a turn above suspicion."""
    tokens: int = 0
    broke_s: float | None = None
    """Time at which it was seen to fail, possibly before its engine is known to have died."""
    reached: bool = True
    """Whether the engine may have received it."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it holds no place any more."""
    refused_s: float | None = None
    """The engine did not take it and wants no more for this long."""

    @property
    def request(self) -> str:
        """The suspect if the engine fails now: the prompt, or the turn with its tokens."""
        return suspected_as(self.turn)

    def hear(self, *, now: float, pause_s: float) -> None:
        """A chunk came; a gap of more than `pause_s` before it was a pause."""
        gap_s, self.chunk_at_s = now - self.chunk_at_s, now
        if gap_s > _ONE_READ_S:
            self.gap_s = gap_s
        if gap_s > pause_s:
            self.paused_s += gap_s

    @property
    def together_s(self) -> float:
        """Time that the next tokens may wait for more, in s; the first ones never wait."""
        if not self.tokens:
            return 0.0
        if not self.turn.is_streamed:
            return TOGETHER_S
        return STREAMED_TOGETHER_S if self.gap_s < _FAST_S else 0.0

    def excuse(self, silence_s: float, *, now: float) -> None:
        """Takes time in which the gateway itself did not listen off the silence."""
        self.chunk_at_s = min(now, self.chunk_at_s + silence_s)

    def cut(self, why: CutReason) -> None:
        if self.why_cut is None and self.task is not None and not self.task.done():
            self.why_cut = why
            self.task.cancel()


def suspected_as(turn: Turn) -> str:
    """The turn's own key once its prompt made tokens, since that prompt cannot kill; else the
    prompt."""
    return turn.key if turn.token_ids else turn.content
