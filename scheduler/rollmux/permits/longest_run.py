"""How long a phase may run before the watchdog warns: its declared bound, corrected by its runs.

A declaration goes stale as a policy learns to write longer responses. A phase that the watchdog
ended never reports its length, so the time it had counts as observed: the next one gets longer.
"""

from typing import Final

import msgspec

MARGIN_RATIO: Final = 1.5
"""Bound over the longest known run: durations of one phase vary, and a drift goes on."""
FADING: Final = 0.95
"""Weight that the longest run keeps per later run, so that one outlier is forgotten."""
CUT_RATIO_MAX: Final = 8.0
"""Most that ended runs alone raise the bound. A phase that needs longer hangs: no drift is that
fast between two completed runs, and others wait for its nodes."""


class LongestRun(msgspec.Struct, frozen=True, kw_only=True):
    """Known durations of one kind of phase of a job, in seconds that it would have taken alone."""

    completed_s: float = 0.0
    """Longest completed run, fading."""
    cut_s: float = 0.0
    """Longest run that the watchdog ended since the last completed one."""

    def completed(self, lasted_s: float) -> "LongestRun":
        return LongestRun(completed_s=max(lasted_s, FADING * self.completed_s))

    def cut(self, lasted_s: float) -> "LongestRun":
        return LongestRun(completed_s=self.completed_s, cut_s=max(lasted_s, self.cut_s))

    def bound_s(self, declared_s: float) -> float:
        """Duration from which on a run is longer than expected, in s."""
        seen_s = max(declared_s, MARGIN_RATIO * self.completed_s)
        return max(seen_s, min(MARGIN_RATIO * self.cut_s, CUT_RATIO_MAX * seen_s))
