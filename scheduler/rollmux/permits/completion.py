"""The completed share at which a phase's tail leaves its nodes, learned from earlier phases.

A holder reports its share of completed responses with its beats. For every phase that completed on
its own nodes, the times at which it passed fixed shares are folded into a mean, as fractions of its
duration. The threshold and the tail's nodes are those that free the most node time by that curve,
with the room that the job's moved tails have needed. Until enough phases were seen, the declared
ones hold. Now and then a tail stays at home, so that the curve follows the job.
"""

from functools import lru_cache
from typing import Final

import msgspec
import numpy as np

from scheduler.model import Completion
from scheduler.rollmux.beliefs.tail import best_tail
from scheduler.rollmux.permits.tail_room import LostTime, TailRoom
from scheduler.rollmux.permits.terms import PhaseTerms

RATIOS: Final = tuple(percent / 100 for percent in range(50, 100, 5))
"""Completed shares whose times are kept."""
SEEN_MIN: Final = 3
"""Phases before the curve counts: the first of a process also loads its state."""
MEMORY: Final = 20.0
"""Memory in phases: the completion of a job's responses changes while its policy learns."""
_WEIGHT_MAX: Final = 0.25
"""Cap on the weight of one phase, once `SEEN_MIN` were seen: each differs from the next."""
_MOVED_MAX: Final = 99
"""Tails that move in a row before one stays at home; a single one until `SEEN_MIN` have stayed."""
_LEAST_RATIO: Final = 1e-3
"""Least share of a phase's time that counts as passed: estimates need a positive one."""


class ProgressTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one phase over time, in seconds of solo work."""

    passed_s: tuple[float, ...] = ()
    """Time of passing each of the first `RATIOS`, in s."""
    at_s: float = 0.0
    ratio: float = 0.0

    def progressed(self, ratio: float, *, at_s: float) -> "ProgressTimes":
        """Folds a beat's share in; responses are taken to complete evenly between two beats."""
        ratio = min(ratio, 1.0)
        if not (ratio > self.ratio and at_s >= self.at_s):
            return self
        passed_s = list(self.passed_s)
        for completed in RATIOS[len(passed_s) :]:
            if completed > ratio:
                break
            within = (completed - self.ratio) / (ratio - self.ratio)
            passed_s.append(self.at_s + within * (at_s - self.at_s))
        return ProgressTimes(passed_s=tuple(passed_s), at_s=at_s, ratio=ratio)


class TailMove(msgspec.Struct, frozen=True, kw_only=True):
    """A running phase's tail that was asked to leave a part of its nodes."""

    course: ProgressTimes
    """Progress until then."""
    asked_s: float
    left_s: float | None = None
    """Times of the question and of the move's end, in seconds of solo work; None: not yet moved."""


class CompletionCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Completion over time of one kind of phase of a job, from its latest ones."""

    at_home: int = 0
    """Number of phases whose tail stayed at home."""
    times: tuple[float, ...] = ()
    """Share of the phase's time after which each of `RATIOS` was complete at home."""
    references: float = 1.0
    """Number of phases whose plain mean would be as exact."""
    room: TailRoom = TailRoom()
    moved: int = 0
    """Number of moved tails since one stayed at home."""

    @property
    def stays(self) -> bool:
        """Whether the next tail stays at home, for the curve."""
        return self.moved >= (_MOVED_MAX if self.is_known else 1)

    @property
    def is_known(self) -> bool:
        return self.at_home >= SEEN_MIN

    def after(
        self, course: ProgressTimes, *, lasted_s: float, loading_s: float = 0.0
    ) -> "CompletionCurve":
        """Folds in one more phase that ran at home for `lasted_s`, after loading; a phase that
        reported no progress teaches nothing."""
        if course.ratio <= 0.0 or lasted_s <= 0.0:
            return self
        ended = course.progressed(1.0, at_s=max(course.at_s, lasted_s + loading_s))
        if len(ended.passed_s) < len(RATIOS):
            return self
        found = [min(1.0, max(0.0, passed_s - loading_s) / lasted_s) for passed_s in ended.passed_s]
        # It stands for the phases whose tails have moved since the last one, too.
        weight = max(1.0 / (self.at_home + 1.0), min((1.0 + self.moved) / MEMORY, _WEIGHT_MAX))
        old = self.times or found
        times = tuple(a + weight * (b - a) for a, b in zip(old, found, strict=True))
        room = self.room.after_tail_at_home()
        references = 1.0 / ((1.0 - weight) ** 2 / self.references + weight**2)
        return CompletionCurve(
            at_home=self.at_home + 1, times=times, references=references, room=room
        )

    def after_move(
        self, move: TailMove, *, worked_s: float, loading_s: float
    ) -> tuple["CompletionCurve", LostTime]:
        """Folds in one more phase whose tail moved; it worked for `worked_s`, of which loading and
        the move took `loading_s`."""
        curve = msgspec.structs.replace(self, moved=self.moved + 1)
        course = move.course
        if move.left_s is None or course.ratio < RATIOS[0] or not self.is_known:
            return curve, LostTime()
        loaded_s = max(0.0, loading_s - (move.left_s - move.asked_s))
        passed_ratio = float(np.interp(course.ratio, (*RATIOS, 1.0), (*self.times, 1.0)))
        phase_s = max(0.0, course.at_s - loaded_s) / max(passed_ratio, _LEAST_RATIO)
        room, lost = self.room.after(
            took_s=worked_s - move.left_s,
            home_s=phase_s - (move.asked_s - loaded_s),
            phase_s=phase_s,
            waited_s=move.asked_s - course.at_s,
            references=self.references,
        )
        return msgspec.structs.replace(curve, room=room), lost

    def forget_tails(self) -> "CompletionCurve":
        """Keeps the room, and nothing of the tails that it was compared with."""
        return msgspec.structs.replace(self, room=TailRoom(ratio=self.room.ratio))

    @property
    def points(self) -> tuple[Completion, ...]:
        return tuple(Completion(*point) for point in zip(self.times, RATIOS, strict=True))


def tail_of(phase: PhaseTerms, curve: CompletionCurve | None) -> tuple[float, int]:
    """Completed share from which the phase's tail may leave, and how many accelerators it keeps.

    A share of 1: it keeps all to its end.
    """
    if not phase.learn_tail or curve is None or not curve.is_known:
        return phase.tail_ratio, phase.tail_accelerators
    return _learned_tail(curve.times, curve.room.ratio, phase.all_accelerators)


# Every beat asks.
@lru_cache(maxsize=4096)
def _learned_tail(
    times: tuple[float, ...], room_ratio: float, accelerators: int
) -> tuple[float, int]:
    points = CompletionCurve(times=times).points
    threshold, shape = best_tail(points, accelerators=accelerators, room_ratio=room_ratio)
    return threshold, round(shape.share * accelerators)
