"""Back-off for an engine whose weights another scheduler changes.

Two schedulers that publish to one engine would undo each other's work without end. Each returns
later from time to time, so that turns are served between. Reads no clock.
"""

from dataclasses import dataclass

FORGOTTEN_S = 300.0
_FIRST_S = 1.0
_LONGEST_S = 60.0


@dataclass(slots=True)
class Meddling:
    times: int = 0
    until_s: float = 0.0
    _last_s: float = 0.0

    def seen(self, *, now: float) -> bool:
        """Records one change; True for the first since the last was forgotten, which costs no
        wait."""
        if self.times and now - self._last_s > FORGOTTEN_S:
            self.times = 0
        self.times, self._last_s = self.times + 1, now
        wait_s = 0.0
        if self.times > 1:
            wait_s = min(_FIRST_S * 2.0 ** min(self.times - 2, 16), _LONGEST_S)
        self.until_s = now + wait_s
        return self.times == 1

    def may_return(self, *, now: float) -> bool:
        return now >= self.until_s
