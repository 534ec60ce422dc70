"""Pauses between tries of a control that is away: doubling, and bounded in all."""

import threading

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted

_FIRST_S = 0.02
_LONGEST_S = 0.5


class Pauses:
    def __init__(self, clock: Clock, *, timeout_s: float) -> None:
        self._clock = clock
        self._until_s = clock.now() + timeout_s
        self._timeout_s = timeout_s
        self._next_s = _FIRST_S

    def check(self, why: str) -> None:
        """Raises Exhausted when the time is up."""
        if self._clock.now() >= self._until_s:
            raise Exhausted(f"not within {self._timeout_s:g} s: {why}")

    def pause(self, why: Exhausted) -> None:
        """Raises Exhausted when the time is up."""
        self.check(str(why))
        threading.Event().wait(self._next_s)
        self._next_s = min(_LONGEST_S, 2 * self._next_s)
