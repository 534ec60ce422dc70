"""Configured times that are measured as well: the durations of a move and of a warm start.

A faded mean of observations that starts at the configured value. Forecasts and prices take a new
value only if it differs by a quarter: each change makes the planner forecast everything again.
"""

from typing import Final

import msgspec

_MEMORY: Final = 16.0
"""Length of the mean's memory, in observations."""
_SET_FOR: Final = 4.0
"""Weight of the configured value, in observations."""
_STEP_RATIO: Final = 0.25
_MOST_RATIO: Final = 8.0
"""Cap on one observation, as a ratio of the mean: an absence of hours is no move of hours."""


class MeasuredSeconds(msgspec.Struct, kw_only=True):
    mean_s: float
    in_force_s: float
    seen: float = _SET_FOR

    @classmethod
    def begin(cls, set_s: float) -> "MeasuredSeconds":
        return cls(mean_s=set_s, in_force_s=set_s)

    def observe(self, seconds: float) -> bool:
        """Folds one duration in; True if the value in force has changed."""
        most_s = _MOST_RATIO * max(self.mean_s, 1.0)
        self.seen = min(self.seen + 1.0, _MEMORY)
        self.mean_s += (min(seconds, most_s) - self.mean_s) / self.seen
        changed = abs(self.mean_s - self.in_force_s) > _STEP_RATIO * max(self.in_force_s, 1.0)
        if changed:
            self.in_force_s = self.mean_s
        return changed
