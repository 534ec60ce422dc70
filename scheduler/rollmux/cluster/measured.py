"""Configured times that are measured as well: the durations of a move and of a warm start.

A faded mean of observations that starts at the configured value. Forecasts and prices take a new
value only if it differs by a quarter: each change makes the planner forecast everything again.
"""

from typing import Final

import msgspec

from scheduler.model import PhaseKind
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.cluster.job_limits import KINDS
from scheduler.rollmux.cluster.job_placement import JobPlacement
from scheduler.rollmux.permits.events import EndPermit
from scheduler.rollmux.planner.planner import GroupPlanner

_MEMORY: Final = 16.0
"""Length of the mean's memory, in observations."""
_SET_FOR: Final = 4.0
"""Weight of the configured value, in observations."""
_STEP_RATIO: Final = 0.25
_MOST_RATIO: Final = 8.0
"""Cap on one observation, as a ratio of the mean: a job away for hours did not move for hours."""
_LEAST_LOAD_S: Final = 1e-3
_MOST_WARM_RATIO: Final = 8.0
"""Cap on a reported start from host memory, over the configured one: every tenant's jobs are
planned by these reports."""


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


class LoadTimes:
    """Learns both durations from the phases that end; the planner takes the values in force."""

    def __init__(self, config: ClusterConfig, planner: GroupPlanner) -> None:
        self.move = MeasuredSeconds.begin(config.move_s)
        self.warm_start = MeasuredSeconds.begin(config.warm_start_s)
        self._most_warm_s = _MOST_WARM_RATIO * max(1.0, config.warm_start_s)
        self._planner = planner

    def observe(self, placed: JobPlacement, end: EndPermit) -> bool:
        """Loads of the first phases on new nodes are of the move; the others are warm starts. True
        if a value in force has changed."""
        first = placed.loads > 0 and end.kind in KINDS
        placed.loads -= first
        changed = False
        if first and placed.moving_s is not None:
            placed.moving_s += end.loading_s
            changed = not placed.loads and self.move.observe(placed.moving_s)
        # A rollout may have moved its tail, too; a state that was still loaded takes no time.
        if not first and end.kind is PhaseKind.TRAINING and end.loading_s >= _LEAST_LOAD_S:
            changed = self.warm_start.observe(min(end.loading_s, self._most_warm_s))
        if changed:
            self._put_in_force()
        return changed

    def restore(self, move: MeasuredSeconds | None, warm_start: MeasuredSeconds | None) -> None:
        """Records of an earlier process; None: it wrote none."""
        self.move, self.warm_start = move or self.move, warm_start or self.warm_start
        self._put_in_force()

    def _put_in_force(self) -> None:
        self._planner.set_move_s(self.move.in_force_s)
        self._planner.set_warm_start_s(self.warm_start.in_force_s)
