"""Which KV prefixes a guest keeps for trajectories away at their tools, and which go first.

    worth of a prefix = chance that its trajectory comes back, having been away for so long

All blocks hold equally many tokens, so this is the prefill saved per byte. First turns and later
ones are learned apart: of a job of single turns nothing is kept, while a trajectory that came back
once usually comes again. The least worth goes first, the oldest of equals before the others, and
those whose next turn is in the engine already go last.

Blocks are numbers here. Prefixes that begin alike share blocks, which count once. Knows no vLLM and
reads no clock; the room is the caller's.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from coserve.law.return_times import ReturnTimes

LEAST_WORTH = 0.05
"""A prefix that is needed again once in twenty times costs others more than it saves."""
MOST_TRAJECTORIES = 4096
"""Remembered, with a prefix or without one: who comes back teaches either way."""


@dataclass(slots=True)
class _Trajectory:
    turns: int = 0
    seen_s: float = 0.0
    """When its last turn ended; while a turn is here, when that was noticed last."""
    here: bool = False
    """Its next turn is in the engine."""
    blocks: tuple[int, ...] = ()

    @property
    def begun(self) -> bool:
        """It came back at least once."""
        return self.turns > 1


class PrefixRetention:
    def __init__(self) -> None:
        self._trajectories: OrderedDict[str, _Trajectory] = OrderedDict()
        """Who was seen longest ago comes first."""
        self._users: Counter[int] = Counter()
        self._first_turns, self._later_turns = ReturnTimes(), ReturnTimes()

    @property
    def blocks(self) -> int:
        """Kept, each counted once."""
        return len(self._users)

    def came_back(self, trajectory: str, *, now: float) -> None:
        """Its next turn is in the engine; what is kept for it waits for that turn's first step."""
        known = self._trajectories.get(trajectory)
        if known is not None and not known.here:
            self._times(known).came_back(now - known.seen_s)
            self._see(trajectory, here=True, now=now)

    def turned_away(self, trajectory: str, *, now: float) -> None:
        """Its turn went without a step, so that it may come again."""
        if trajectory in self._trajectories:
            self._see(trajectory, here=False, now=now)

    def left(self, trajectory: str, blocks: Sequence[int], *, now: float) -> bool:
        """A turn of it has ended and leaves these. False where they are not worth keeping."""
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
        """Its blocks are kept no more."""
        known = self._trajectories.get(trajectory)
        if known is None:
            return
        for block in known.blocks:
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
        known.blocks = ()

    def given_up(self, *, now: float) -> list[str]:
        """Those that will not come back, which are forgotten."""
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
        """Everybody for whom something is kept, in the order in which it may go."""
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
