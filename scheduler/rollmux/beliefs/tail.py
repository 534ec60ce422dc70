"""The completed share at which a rollout's tail leaves its nodes, learned for each job.

Responses finish fast at first and slowly at last. From some completed share on, the rest fits on a
part of the accelerators at unchanged speed, and moving it frees the others. The paper moves at 80 %
for all; here the threshold is the one that frees the most accelerator time, by the job's own
completion curve, counted in whole accelerators.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Final

import numpy as np
import numpy.typing as npt

from scheduler.model import Completion

PAPER_THRESHOLD: Final = 0.8
_THRESHOLDS: Final = np.arange(50, 100) / 100
ROOM_RATIO: Final = 1.25
"""Accelerators that a tail gets at first, over its share of the responses; a job whose moved tails
are slower than at home gets more (permits/tail_room.py)."""


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


def tail_accelerators(
    threshold: float, accelerators: int, *, room_ratio: float = ROOM_RATIO
) -> int:
    """Accelerators for the responses still open once `threshold` is complete; at least one."""
    # Rounding before ceil: 0.2 * 1.25 * 8 must be 2 accelerators, not 3.
    needed = ceil(round(accelerators * room_ratio * (1.0 - threshold), 6))
    return min(max(1, needed), accelerators)


def best_shape(
    curve: Sequence[Completion], *, accelerators: int, room_ratio: float = ROOM_RATIO
) -> TailShape:
    """The shape that needs the least node time; `curve` rises in both and may be empty."""
    return best_tail(curve, accelerators=accelerators, room_ratio=room_ratio)[1]


def best_tail(
    curve: Sequence[Completion], *, accelerators: int, room_ratio: float = ROOM_RATIO
) -> tuple[float, TailShape]:
    """The threshold of that shape, too; 1 where the rollout is better undivided."""
    return _best_tail(tuple(curve), accelerators, room_ratio) if curve else (1.0, UNDIVIDED)


# Permits, plan and forecast ask the same of a job's latest curve.
@lru_cache(maxsize=4096)
def _best_tail(
    curve: tuple[Completion, ...], accelerators: int, room_ratio: float
) -> tuple[float, TailShape]:
    points = np.array([(0.0, 0.0), *curve, (1.0, 1.0)])
    bulks = np.interp(_THRESHOLDS, points[:, 1], points[:, 0])
    shares = _kept(accelerators, room_ratio) / accelerators
    node_ratios = np.where((shares < 1.0) & (bulks < 1.0), bulks + (1.0 - bulks) * shares, 1.0)
    best = int(node_ratios.argmin())
    if node_ratios[best] >= 1.0:
        return 1.0, UNDIVIDED
    shape = TailShape(bulk_ratio=float(bulks[best]), share=float(shares[best]))
    return float(_THRESHOLDS[best]), shape


@lru_cache(maxsize=4096)
def _kept(accelerators: int, room_ratio: float) -> npt.NDArray[np.float64]:
    """Accelerators that the tail keeps, by threshold."""
    kept = (tail_accelerators(each, accelerators, room_ratio=room_ratio) for each in _THRESHOLDS)
    return np.array([float(count) for count in kept])
