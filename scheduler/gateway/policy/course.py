"""Progress of one turn: results of its attempts since its last token, and engines to avoid.

Deaths under it bound a turn, and time without a token, waits for its job's turn at the engines
left out; refusals and aborts are not counted. A silent engine looks like one that computes a long
prompt. Therefore, after a turn is taken off an engine for silence, it waits twice as long on the
next one, and does not return soon to a silent engine without a gate. Reads no clock.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from harvester.contracts.doubling import doubled_s
from harvester.contracts.ids import EngineId

USUAL_FIRST_TOKENS = 3.0
"""Least silence that counts as a stall, in usual first-token times."""
PAUSE_MAX_S = 8.0
"""Cap of the doubling pause between attempts without a token; a longer requested pause is kept."""

_FIRST_TOKENS_KEPT = 32


class FirstTokens:
    """Usual time to a turn's first token: its prefill and its wait.

    The median of the last turns: a hung engine that goes on after a minute does not raise it.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_FIRST_TOKENS_KEPT)
        self.usual_s = 0.0
        """0 before any was seen."""

    def note(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self.usual_s = median(self._seconds)


@dataclass(slots=True)
class EngineWait:
    """A turn's wait for a place on an engine, over all of its arrivals: it arrives again where the
    engines that it avoids change."""

    since_s: float | None = None
    """Time since which the turn waits; None before its first arrival."""
    servable_s: float = 0.0
    """Time at which an engine last could have served it, or the wait began."""
    barred_s: float = 0.0
    """Part of the wait in which the job was paused, or had neither a permit nor a guest."""


@dataclass(slots=True)
class TurnCourse:
    pin_until_s: float = math.inf
    """A pin that no engine meets yet is waited for until then."""
    wait: EngineWait = field(default_factory=EngineWait)
    resumed: bool = False
    """Whether it has been on an engine."""
    suspect: str = ""
    """The suspect's name at the last placement."""
    deaths: int = 0
    """Engines that died under the turn, for any reason."""
    why: str = ""
    """Reason of the latest failure."""
    interruption: str = ""
    """Cause for which the latest attempt ended before its turn; empty if its job asked for that."""
    ended_short: tuple[EngineId, int] | None = None
    """Engine that reported `length` below its context, and the turn's length in tokens then."""
    too_short: set[EngineId] = field(default_factory=set)
    """Engines that refused it as too long for their context, which by their reports is longer."""
    _setbacks: int = 0
    _stalls: int = 0
    """Attempts taken off silent engines since its last token."""
    _stuck_since_s: float | None = None
    _avoided: dict[EngineId, float] = field(default_factory=dict)

    def attempted(self, *, tokens: int, began_s: float) -> None:
        if tokens:
            self._setbacks, self._stalls, self._stuck_since_s = 0, 0, None
        elif self._stuck_since_s is None:
            self._stuck_since_s = began_s
        else:
            self._stuck_since_s += self.wait.barred_s
        self.resumed, self.wait = True, EngineWait()

    def avoid(self, engine: EngineId, pause_s: float, why: str, *, now: float) -> None:
        longer_s = doubled_s(pause_s, self._setbacks, most_s=PAUSE_MAX_S)
        self._avoided[engine] = now + max(pause_s, longer_s)
        self._setbacks += 1
        self.why = why

    def stall_after_s(self, stall_s: float, *, usual_first_token_s: float) -> float:
        """The silence after which it leaves an engine."""
        usual_s = USUAL_FIRST_TOKENS * usual_first_token_s
        return max(doubled_s(stall_s, self._stalls), usual_s)

    def stalled(self, engine: EngineId, *, gated: bool, now: float) -> None:
        """Records that it was taken off a silent engine. A closed gate opens as suddenly as it
        closes."""
        self._stalls += 1
        if not gated:
            self._avoided[engine] = now + PAUSE_MAX_S
        self.why = f"{engine}: stall"

    def avoids(self, *, now: float) -> dict[EngineId, float]:
        """Engines that it does not go to, and until when."""
        self._avoided = {at: until_s for at, until_s in self._avoided.items() if now < until_s}
        return self._avoided

    def given_up(self, *, max_deaths: int, stuck_s: float, now: float) -> str:
        """The reason; empty while it is tried again."""
        if self.deaths >= max_deaths:
            return f"{self.deaths} engines died under it; lastly: {self.why}"
        since_s = math.inf if self._stuck_since_s is None else self._stuck_since_s
        if now - since_s - self.wait.barred_s > stuck_s:
            return f"no engine made a token of it for {stuck_s:.0f} s; lastly: {self.why}"
        return ""
