"""Usual time to a turn's first token on the fleet's engines: its prefill, and its wait."""

from collections import deque
from statistics import median

_KEPT = 32


class FirstTokens:
    """The median of the last turns: a hung engine that goes on after a minute does not raise it."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self.usual_s = 0.0
        """0 before any was seen."""

    def note(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self.usual_s = median(self._seconds)
