"""The completed share at which a phase's tail leaves its nodes, learned from earlier phases.

A holder reports its share of completed responses with its beats. For every phase that completed,
the times at which it passed fixed shares are folded into a mean, as fractions of its duration. The
threshold and the tail's nodes are those that free the most node time by that curve. Until enough
phases were seen, the declared ones hold.
"""

from functools import lru_cache
from typing import Final

import msgspec

from scheduler.model import Completion
from scheduler.rollmux.beliefs.tail import best_tail
from scheduler.rollmux.permits.terms import PhaseTerms

RATIOS: Final = tuple(percent / 100 for percent in range(50, 100, 5))
"""Completed shares whose times are kept."""
SEEN_MIN: Final = 3
"""Phases before the curve counts: the first of a process also loads its state."""
MEMORY: Final = 20.0
"""Memory in phases: the completion of a job's responses changes while its policy learns."""


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


class CompletionCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Completion over time of one kind of phase of a job, from its latest ones."""

    seen: int = 0
    times: tuple[float, ...] = ()
    """Share of the phase's time after which each of `RATIOS` was complete."""

    def after(self, course: ProgressTimes, *, lasted_s: float) -> "CompletionCurve":
        """Folds one more phase in; a phase that reported no progress teaches nothing."""
        if course.ratio <= 0.0 or lasted_s <= 0.0:
            return self
        ended = course.progressed(1.0, at_s=lasted_s)
        if len(ended.passed_s) < len(RATIOS):
            return self
        found = [min(1.0, passed_s / lasted_s) for passed_s in ended.passed_s]
        weight = 1.0 / min(self.seen + 1.0, MEMORY)
        old = self.times or found
        times = tuple(a + weight * (b - a) for a, b in zip(old, found, strict=True))
        return CompletionCurve(seen=self.seen + 1, times=times)

    @property
    def points(self) -> tuple[Completion, ...]:
        return tuple(Completion(*point) for point in zip(self.times, RATIOS, strict=True))


def tail_of(phase: PhaseTerms, curve: CompletionCurve | None) -> tuple[float, int]:
    """Completed share from which the phase's tail may leave, and how many accelerators it keeps.

    A share of 1: it keeps all to its end.
    """
    if not phase.learn_tail or curve is None or curve.seen < SEEN_MIN:
        return phase.tail_ratio, phase.tail_accelerators
    return _learned_tail(curve, phase.all_accelerators)


@lru_cache(maxsize=4096)
def _learned_tail(curve: CompletionCurve, accelerators: int) -> tuple[float, int]:
    threshold, shape = best_tail(curve.points, accelerators=accelerators)
    return threshold, round(shape.share * accelerators)
