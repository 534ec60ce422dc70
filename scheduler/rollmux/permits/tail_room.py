"""Time that moved tails lose on the accelerators that they kept, against tails that stayed at home.

A tail that leaves most of its nodes is to run as fast as before. How much room that takes depends
on the job's engine and responses, so it is learned: the time that a phase had taken when it passed
a completed share tells, by the completion curve of phases that stayed at home, what all of it would
have taken there. Tails that took longer get more room; what they lost is no time alone.
"""

from math import sqrt
from typing import Final, NamedTuple

import msgspec

from scheduler.rollmux.beliefs.tail import ROOM_RATIO

_TAILS_MIN: Final = 4
_TAILS_MAX: Final = 32
"""Tails that are remembered; then all of them count half."""
_SURE_ERRORS: Final = 2.0
"""A slow-down of fewer standard errors may be the spread of the job's responses."""
_REFERENCES_MAX: Final = 10.0
"""Phases at home that a curve is worth at most: it may be of an earlier policy."""
_SLOW_RATIO: Final = 1.15
"""Tails that take longer than this, over home, get more room."""
_LESS_RATIO: Final = 0.9
"""Factor on a room at which `_TAILS_MAX` tails were as fast as at home, or stayed there: it may be
more than they need."""
_ROOM_MAX: Final = 20.0
"""All accelerators for the last twentieth of the responses."""
_TAIL_MAX_RATIO: Final = 4.0
"""Cap on one tail's time, over home: a straggler says little about room."""
_REST_MIN_RATIO: Final = 0.1
"""A shorter rest, over the phase's time at home, teaches nothing: the phase's own spread is
larger."""
_WAITED_MAX_RATIO: Final = 0.25
"""Longest time from the completed share to the move, over the expected rest. Tails that moved later
are the long ones: the short ones had ended, and nothing of them was compared."""


class LostTime(NamedTuple):
    """Time that moved tails took longer than at home, in s; 0 where that may be chance."""

    here_s: float = 0.0
    """Part of the tail that has ended."""
    earlier_s: float = 0.0
    """Part of earlier ones, which might have been chance until now."""


class TailRoom(msgspec.Struct, frozen=True, kw_only=True):
    """Room of a job's tails: accelerators over their share of the responses."""

    ratio: float = ROOM_RATIO
    tails: int = 0
    """Number of tails compared at this room."""
    took_s: float = 0.0
    """Sum of their times from the move on."""
    home_s: float = 0.0
    """Sum of the times that they would have taken at home."""
    squares_s2: float = 0.0
    """Sum of the squared differences of both."""
    references: float = _REFERENCES_MAX
    """Number of phases at home that the curve is worth. Its error is common to all tails."""
    counted_s: float = 0.0
    """Part of the difference of both sums that was returned as lost."""
    stayed: int = 0
    """Number of tails since the last that moved."""

    @property
    def slowdown(self) -> float:
        """Time of moved tails at this room over their time at home; 1 where it may be chance."""
        lost_s = self.took_s - self.home_s
        if self.tails < _TAILS_MIN or lost_s <= 0.0:
            return 1.0
        spread_s2 = max(0.0, self.squares_s2 - lost_s**2 / self.tails)
        one_s2 = spread_s2 / (self.tails - 1)
        error_s = sqrt(one_s2 * self.tails + one_s2 * self.tails**2 / self.references)
        return self.took_s / self.home_s if lost_s > _SURE_ERRORS * error_s else 1.0

    def after(
        self, *, took_s: float, home_s: float, phase_s: float, waited_s: float, references: float
    ) -> tuple["TailRoom", LostTime]:
        """Folds in one more moved tail, which took `took_s` and would have taken `home_s` at home,
        of a phase of `phase_s`. It moved `waited_s` after the completed share that tells so, by the
        curve of `references` phases at home."""
        compared_s = min(took_s, _TAIL_MAX_RATIO * max(home_s, 0.0))
        if home_s < _REST_MIN_RATIO * phase_s or waited_s > _WAITED_MAX_RATIO * (home_s + waited_s):
            lost = LostTime(here_s=self._lost_s(compared_s))
            return msgspec.structs.replace(self, stayed=0), lost
        seen = TailRoom(
            ratio=self.ratio,
            tails=self.tails + 1,
            took_s=self.took_s + compared_s,
            home_s=self.home_s + home_s,
            squares_s2=self.squares_s2 + (compared_s - home_s) ** 2,
            counted_s=self.counted_s,
            references=min(references, _REFERENCES_MAX),
        )
        if seen.slowdown == 1.0:
            return seen if seen.tails < _TAILS_MAX else seen._less(), LostTime()
        here_s = seen._lost_s(compared_s)
        earlier_s = max(0.0, seen.took_s - seen.home_s - seen.counted_s - here_s)
        seen = msgspec.structs.replace(seen, counted_s=seen.counted_s + here_s + earlier_s)
        lost = LostTime(here_s, earlier_s)
        if seen.slowdown > _SLOW_RATIO:
            return TailRoom(ratio=min(_ROOM_MAX, seen.ratio * seen.slowdown)), lost
        return seen if seen.tails < _TAILS_MAX else seen._halved(), lost

    def _lost_s(self, took_s: float) -> float:
        return took_s * (1.0 - 1.0 / self.slowdown)

    def after_tail_at_home(self) -> "TailRoom":
        """Folds in one more tail that did not move: with too much room none does, and none would
        show that less is enough."""
        if self.ratio == ROOM_RATIO:
            return self
        seen = msgspec.structs.replace(self, stayed=self.stayed + 1)
        return seen if seen.stayed < _TAILS_MAX else seen._less()

    def _less(self) -> "TailRoom":
        if self.ratio == ROOM_RATIO:
            return self._halved()
        return TailRoom(ratio=max(ROOM_RATIO, self.ratio * _LESS_RATIO))

    def _halved(self) -> "TailRoom":
        return TailRoom(
            ratio=self.ratio,
            tails=self.tails // 2,
            took_s=self.took_s / 2,
            home_s=self.home_s / 2,
            squares_s2=self.squares_s2 / 2,
            counted_s=self.counted_s / 2,
            references=self.references,
        )
