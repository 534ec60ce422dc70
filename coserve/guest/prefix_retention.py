"""Decides the KV prefixes that a guest keeps for trajectories that await a tool, and their order of
eviction.

    worth of a prefix = chance that its trajectory returns, given its absence so far

All blocks hold equally many tokens, so this is the prefill saved per byte. First turns and later
turns are learned separately: a job of single turns keeps nothing, while a trajectory that returned
once usually returns again. The prefix of least worth is evicted first, the oldest among equals, and
prefixes whose next turn is already in the engine last. Blocks are numbers here; those that prefixes
share count once. The caller decides the room.
"""

import math
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_WORTH = 0.05
"""A prefix that is reused once in twenty times costs others more than it saves."""
MOST_TRAJECTORIES = 4096
"""Bound on remembered trajectories, with or without a prefix: each absence teaches a return
time.
"""
_WINDOW = 256
# Used before anything is learned: longer than most tools run, short compared with an RL step.
_PATIENCE_S = 600.0
_LEAST_PATIENCE_S = 60.0
_MOST_PATIENCE_S = 3600.0
_PATIENCE_RATIO = 4.0


class ReturnTimes:
    """Estimates how likely a trajectory that awaits a tool returns for another turn.

        chance(t) = (returns seen later than t + 1/2) / (those + trajectories that never came + 1)

    A trajectory that is away for longer than every observed return counts as never returned, but is
    forgotten only much later: a tool slower than all before it must get the chance to be observed.
    Learned from the last 256 absences, so that new tools and new jobs are followed. The longer an
    absence, the less likely a return: of equals the oldest is worth least.
    """

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


@dataclass(slots=True)
class _Trajectory:
    turns: int = 0
    seen_s: float = 0.0
    """End of its last turn; while a turn is in the engine, the time at which that was last
    noticed.
    """
    here: bool = False
    """Whether its next turn is in the engine."""
    blocks: tuple[int, ...] = ()

    @property
    def begun(self) -> bool:
        """Whether it returned at least once."""
        return self.turns > 1


class PrefixRetention:
    def __init__(self) -> None:
        self._trajectories: OrderedDict[str, _Trajectory] = OrderedDict()
        """Ordered by the time last seen, oldest first."""
        self._users: Counter[int] = Counter()
        self._first_turns, self._later_turns = ReturnTimes(), ReturnTimes()

    @property
    def blocks(self) -> int:
        """Kept blocks, each counted once."""
        return len(self._users)

    def came_back(self, trajectory: str, *, now: float) -> None:
        """Record that the trajectory's next turn is in the engine; its prefix waits for that first
        step."""
        known = self._trajectories.get(trajectory)
        if known is not None and not known.here:
            self._times(known).came_back(now - known.seen_s)
            self._see(trajectory, here=True, now=now)

    def turned_away(self, trajectory: str, *, now: float) -> None:
        """Record that its turn ended without a step, so that it may return again."""
        if trajectory in self._trajectories:
            self._see(trajectory, here=False, now=now)

    def left(self, trajectory: str, blocks: Sequence[int], *, now: float) -> bool:
        """Record the end of a turn and its blocks. False if they are not worth keeping."""
        known = self._trajectories.setdefault(trajectory, _Trajectory())
        self._see(trajectory, here=False, now=now)
        known.turns += 1
        self.drop(trajectory)
        if not blocks or self._times(known).chance(0.0) < LEAST_WORTH:
            return False
        known.blocks = tuple(blocks)
        self._users.update(known.blocks)
        return True

    def drop(self, trajectory: str) -> None:
        """Release the trajectory's blocks."""
        known = self._trajectories.get(trajectory)
        if known is None:
            return
        for block in known.blocks:
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
        known.blocks = ()

    def ended(self, trajectory: str) -> None:
        """Forget a trajectory that never returns, as its job reported."""
        known = self._trajectories.get(trajectory)
        if known is None or known.here:
            return
        self._times(known).stayed_away()
        self.drop(trajectory)
        del self._trajectories[trajectory]

    def given_up(self, *, now: float) -> list[str]:
        """Forget the trajectories that are not expected back; returns their names."""
        gone: list[str] = []
        while self._trajectories:
            trajectory, oldest = next(iter(self._trajectories.items()))
            times = self._times(oldest)
            late = now - oldest.seen_s > times.patience_s
            if not late and len(self._trajectories) <= MOST_TRAJECTORIES:
                break
            if late and oldest.here:
                self._see(trajectory, here=True, now=now)
                continue
            if late:
                times.stayed_away()
            self.drop(trajectory)
            del self._trajectories[trajectory]
            gone.append(trajectory)
        return gone

    def least_first(self, *, now: float) -> list[str]:
        """All trajectories with a kept prefix, in order of eviction."""
        away = [known for known in self._trajectories.values() if not known.here]
        overdue = Counter(
            known.begun for known in away if self._times(known).overdue(now - known.seen_s)
        )

        def worth(known: _Trajectory) -> float:
            times = self._times(known)
            return times.chance(now - known.seen_s, overdue=overdue[known.begun])

        order = {
            trajectory: (known.here, worth(known), known.seen_s)
            for trajectory, known in self._trajectories.items()
            if known.blocks
        }
        return sorted(order, key=order.__getitem__)

    def _see(self, trajectory: str, *, here: bool, now: float) -> None:
        known = self._trajectories[trajectory]
        known.here, known.seen_s = here, now
        self._trajectories.move_to_end(trajectory)

    def _times(self, known: _Trajectory) -> ReturnTimes:
        return self._later_turns if known.begun else self._first_turns
