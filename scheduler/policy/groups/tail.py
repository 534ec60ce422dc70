"""When a rollout's tail should leave its nodes: a threshold learned for each job.

Responses finish fast at first and slowly at last. From some completed share on, the rest fits on a
part of the accelerators at unchanged speed, and moving it frees the others. The paper moves at 80 %
for all; here the threshold is the one that frees the most accelerator time, by the job's own
completion curve, counted in whole accelerators.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple

PAPER_THRESHOLD: Final = 0.8
ROOM_RATIO: Final = 1.25
"""Accelerators that a tail gets, over its share of the responses: fewer would slow it."""


class Completion(NamedTuple):
    """So much of the responses was complete after so much of the rollout's time."""

    time_ratio: float
    complete_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TailShape:
    """The rollout's bulk ends at `bulk_ratio` of its time; then `share` of the nodes suffices."""

    bulk_ratio: float
    share: float

    @property
    def node_ratio(self) -> float:
        """Node time that a rollout needs, of its time alone."""
        return self.bulk_ratio + (1.0 - self.bulk_ratio) * self.share


UNDIVIDED: Final = TailShape(bulk_ratio=1.0, share=0.0)
"""A rollout that never gives up its nodes early."""


def tail_accelerators(threshold: float, accelerators: int) -> int:
    """So many take what is open once `threshold` is complete; at least one."""
    # Rounding before ceil: 0.2 * 1.25 * 8 must be 2 accelerators, not 3.
    wanted = ceil(round(accelerators * ROOM_RATIO * (1.0 - threshold), 6))
    return min(max(1, wanted), accelerators)


def shape_at(
    threshold: float, curve: Sequence[Completion], *, accelerators: int
) -> TailShape | None:
    """The tail that begins when `threshold` is complete; None where nothing would be freed."""
    earlier = Completion(0.0, 0.0)
    for point in (*curve, Completion(1.0, 1.0)):
        if point.complete_ratio >= threshold:
            span = point.complete_ratio - earlier.complete_ratio
            within = (threshold - earlier.complete_ratio) / span if span > 0 else 1.0
            time_ratio = earlier.time_ratio + within * (point.time_ratio - earlier.time_ratio)
            wanted = tail_accelerators(threshold, accelerators)
            if wanted >= accelerators or time_ratio >= 1.0:
                return None
            return TailShape(bulk_ratio=time_ratio, share=wanted / accelerators)
        earlier = point
    return None


def best_shape(curve: Sequence[Completion], *, accelerators: int) -> TailShape:
    """The shape that needs the least node time; `curve` rises in both and may be empty."""
    return best_tail(curve, accelerators=accelerators)[1]


def best_tail(curve: Sequence[Completion], *, accelerators: int) -> tuple[float, TailShape]:
    """The threshold of that shape, too; 1 where the rollout is better undivided."""
    thresholds = [percent / 100 for percent in range(50, 100)] if curve else []
    shapes = ((each, shape_at(each, curve, accelerators=accelerators)) for each in thresholds)
    return min(
        ((threshold, shape) for threshold, shape in shapes if shape is not None),
        key=lambda found: found[1].node_ratio,
        default=(1.0, UNDIVIDED),
    )
