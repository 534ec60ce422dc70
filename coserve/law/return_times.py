"""How likely a trajectory that is away at its tools comes back for another turn.

    chance(t) = (returns seen later than t + 1/2) / (those + trajectories that never came + 1)

Who is away for longer than anybody who came back counts among those that never came, and is given
up only much later: a tool slower than all before it must be able to show itself. Learned from the
last few hundred absences, so that other tools and another job are followed. The longer one has been
away the less likely it comes: of equals the oldest is worth least. Reads no clock.
"""

import math
from bisect import bisect_right
from collections import deque

_WINDOW = 256
# With nothing learned: longer than most tools run, short beside an RL step.
_PATIENCE_S = 600.0
_LEAST_PATIENCE_S = 60.0
_MOST_PATIENCE_S = 3600.0
_PATIENCE_RATIO = 4.0


class ReturnTimes:
    def __init__(self) -> None:
        self._absences_s: deque[float] = deque(maxlen=_WINDOW)
        """Infinite for one that never ended."""
        self._returns_s: list[float] | None = []
        """The finite ones in order; None until somebody asks."""

    def came_back(self, away_s: float) -> None:
        self._absences_s.append(away_s)
        self._returns_s = None

    def stayed_away(self) -> None:
        self.came_back(math.inf)

    def chance(self, away_s: float, *, overdue: int = 0) -> float:
        """That one comes back that has been away for so long, while so many are overdue."""
        returns = self._returns()
        later = len(returns) - bisect_right(returns, away_s)
        never = len(self._absences_s) - len(returns) + overdue
        return (0.5 + later) / (1.0 + later + never)

    def overdue(self, away_s: float) -> bool:
        returns = self._returns()
        return bool(returns) and away_s > returns[-1]

    @property
    def patience_s(self) -> float:
        """Who is away for longer will not come."""
        returns = self._returns()
        if not returns:
            return _PATIENCE_S
        return min(_MOST_PATIENCE_S, max(_LEAST_PATIENCE_S, _PATIENCE_RATIO * returns[-1]))

    def _returns(self) -> list[float]:
        if self._returns_s is None:
            self._returns_s = sorted(away_s for away_s in self._absences_s if away_s < math.inf)
        return self._returns_s
