"""One engine as routing sees it: its places, and the expected speed of a turn on it.

The speed is learned from turns that left. Old knowledge fades towards the best engine known: a
guest that was slow during a burst is tried again, with a few turns first, and expected to step in
that share of its time in which its production is forecast to be idle. An engine that has been
silent for longer than a turn should take is as slow as its silence: a closed gate gets no more. An
engine that lost turns for its silence is left alone for a while, then tried with a few, and has
all its places again with the first turn that ends on it: a gate opens as suddenly as it closes.
An engine that refuses a turn keeps its present count and gets one more with each end: it has shown
its own limit. It is left alone for the time that it asks for only after it refused two turns in a
row, since a single refusal may be the turn's fault.
"""

import math
from dataclasses import dataclass

from scheduler.gateway.policy.routing_events import EngineOffered
from scheduler.model import EngineKind

# One more stream slows a batched decode step by about this share of a step alone: 740 tokens/s for
# one stream and 9,800 for 32 of the same model give a step of 1.3 ms and 0.06 ms for each stream.
STEP_SHARE_PER_STREAM = 0.05

PROBE_TURNS = 4

# No turn is sent to a silent engine for this long after one was taken off it.
STALL_PAUSE_S = 1.0

# Least idle share that a forecast may imply. A guest that looks slower than this gets no turn, so a
# wrong forecast would never be corrected.
LEAST_IDLE_RATIO = 0.25

# Weight of the guess, in measured tokens; about one turn.
_GUESS_TOKENS = 16.0


@dataclass(slots=True)
class EngineLoad:
    offer: EngineOffered
    """The last one."""
    offered: bool = True
    """Whether it is in force."""
    open_turns: int = 0
    progress_at_s: float = 0.0
    """Time at which a turn last left, or the first of the open ones came."""
    seconds: float = 0.0
    """Stream time of the last turns, older ones decayed, other streams of the step taken out."""
    tokens: float = 0.0
    learned_s: float = 0.0
    stalled_s: float | None = None
    """Time at which a turn was last taken off for silence; None once a turn has ended here
    since."""
    limit: int | None = None
    """Places that the engine's refusals have left."""
    refused: str = ""
    """Turn that was refused last; empty once another one has ended here since."""
    closed_until_s: float = -math.inf

    def fits(self, context_tokens: int) -> bool:
        """Whether the engine's context holds the whole turn; True if its context is unknown."""
        held = self.offer.context_tokens
        return not held or context_tokens <= held

    def free_places(self, *, half_life_s: float, now: float) -> int:
        """A guest of unknown speed, or that fell silent, has places for a few turns only."""
        if now < self.closed_until_s:
            return 0
        places = self.places
        unknown = self.tokens * self._faded(half_life_s, now) < _GUESS_TOKENS
        if self.offer.kind is EngineKind.GUEST and (unknown or self.stalled_s is not None):
            places = min(places, PROBE_TURNS)
        return max(0, places - self.open_turns)

    @property
    def places(self) -> int:
        """Turns at once, as far as its refusals say."""
        places = self.offer.concurrency
        return places if self.limit is None else min(places, self.limit)

    @property
    def s_per_token_alone(self) -> float | None:
        """Measured seconds per token; None before the first token."""
        return self.seconds / self.tokens if self.tokens >= 1 else None

    def begin(self, *, now: float) -> None:
        if self.open_turns == 0:
            self.progress_at_s = now
        self.open_turns += 1

    def stall(self, *, now: float) -> None:
        """Records that a turn was taken off. Its wait dates the gate's closing and shows no
        speed."""
        self.open_turns -= 1
        self.stalled_s = now

    def refuse(self, turn: str, *, retry_s: float, now: float) -> None:
        """The engine refused the turn at once, which shows nothing about its speed."""
        self.open_turns -= 1
        self.limit = max(1, self.open_turns)
        if self.refused not in ("", turn):
            self.closed_until_s = now + retry_s
        self.refused = turn

    def leave(self, *, tokens: int, seconds: float, weight: float, now: float) -> None:
        """A turn lost without a token counts its time: a failing engine becomes a slow one."""
        if tokens:
            self.stalled_s = None
            self.refused = ""
            if self.limit is not None:
                self.limit = self.limit + 1 if self.limit < self.offer.concurrency else None
        alone_s = seconds / (1 + STEP_SHARE_PER_STREAM * self.open_turns)
        self.seconds = (1 - weight) * self.seconds + alone_s
        self.tokens = (1 - weight) * self.tokens + tokens
        self.open_turns -= 1
        self.progress_at_s = self.learned_s = now

    def turn_s(
        self, turn_tokens: float, *, guess_s: float, half_life_s: float, now: float
    ) -> float:
        """Expected time until one more turn of this length would end, that in which the engine is
        closed included. `guess_s` is per token, alone."""
        faded = self._faded(half_life_s, now)
        if self.offer.idle_ratio is not None:
            guess_s /= max(LEAST_IDLE_RATIO, self.offer.idle_ratio)
        alone_s = (self.seconds * faded + _GUESS_TOKENS * guess_s) / (
            self.tokens * faded + _GUESS_TOKENS
        )
        expected_s = turn_tokens * alone_s * (1 + STEP_SHARE_PER_STREAM * (self.open_turns + 1))
        paused = self.stalled_s is not None and now - self.stalled_s < STALL_PAUSE_S
        if self.open_turns or paused:
            expected_s = max(expected_s, now - self.progress_at_s)
        return expected_s + max(0.0, self.closed_until_s - now)

    def _faded(self, half_life_s: float, now: float) -> float:
        """Remaining weight of the learned speed, in (0, 1]."""
        return math.exp2((self.learned_s - now) / half_life_s)
