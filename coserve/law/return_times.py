"""Estimates how likely a trajectory that awaits a tool returns for another turn.

    chance(t) = (returns seen later than t + 1/2) / (those + trajectories that never came + 1)

A trajectory that is away for longer than every observed return counts as never returned, but is
forgotten only much later: a tool slower than all before it must get the chance to be observed.
Learned from the last 256 absences, so that new tools and new jobs are followed. The longer an
absence, the less likely a return: of equals the oldest is worth least. Reads no clock.
"""

import math
from bisect import bisect_right
from collections import deque

_WINDOW = 256
# With nothing learned: longer than most tools run, short compared with an RL step.
_PATIENCE_S = 600.0
_LEAST_PATIENCE_S = 60.0
_MOST_PATIENCE_S = 3600.0
_PATIENCE_RATIO = 4.0


class ReturnTimes:
    def __init__(self) -> None:
        self._absences_s: deque[float] = deque(maxlen=_WINDOW)
        """Infinite for a trajectory that never returned."""
        self._returns_s: list[float] | None = []
        """The finite absences in ascending order; None until the next query sorts them."""

    def came_back(self, away_s: float) -> None:
        self._absences_s.append(away_s)
        self._returns_s = None

    def stayed_away(self) -> None:
        self.came_back(math.inf)

    def chance(self, away_s: float, *, overdue: int = 0) -> float:
        """Chance of a return after an absence of `away_s`; `overdue` absences count as never
        returned."""
        returns = self._returns()
        later = len(returns) - bisect_right(returns, away_s)
        never = len(self._absences_s) - len(returns) + overdue
        return (0.5 + later) / (1.0 + later + never)

    def overdue(self, away_s: float) -> bool:
        returns = self._returns()
        return bool(returns) and away_s > returns[-1]

    @property
    def patience_s(self) -> float:
        """Absence after which a trajectory is forgotten."""
        returns = self._returns()
        if not returns:
            return _PATIENCE_S
        return min(_MOST_PATIENCE_S, max(_LEAST_PATIENCE_S, _PATIENCE_RATIO * returns[-1]))

    def _returns(self) -> list[float]:
        if self._returns_s is None:
            self._returns_s = sorted(away_s for away_s in self._absences_s if away_s < math.inf)
        return self._returns_s
