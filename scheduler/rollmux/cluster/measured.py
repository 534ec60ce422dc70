"""Times that were set and are measured: what a move and a warm start really take.

A faded mean of what is seen, that begins at what was set. Forecasts and prices take a new value
only where it differs by a quarter: each change makes the planner forecast everything again.
"""

from typing import Final

import msgspec

_MEMORY: Final = 16.0
"""Observations."""
_SET_FOR: Final = 4.0
"""Observations that what was set counts for."""
_STEP_RATIO: Final = 0.25
_MOST_RATIO: Final = 8.0
"""Of one observation over the mean: a job that was away for hours says nothing of its move."""


class MeasuredSeconds(msgspec.Struct, kw_only=True):
    mean_s: float
    in_force_s: float
    seen: float = _SET_FOR

    @classmethod
    def begin(cls, set_s: float) -> "MeasuredSeconds":
        return cls(mean_s=set_s, in_force_s=set_s)

    def observe(self, seconds: float) -> bool:
        """Whether what is in force has changed."""
        most_s = _MOST_RATIO * max(self.mean_s, 1.0)
        self.seen = min(self.seen + 1.0, _MEMORY)
        self.mean_s += (min(seconds, most_s) - self.mean_s) / self.seen
        changed = abs(self.mean_s - self.in_force_s) > _STEP_RATIO * max(self.in_force_s, 1.0)
        if changed:
            self.in_force_s = self.mean_s
        return changed
