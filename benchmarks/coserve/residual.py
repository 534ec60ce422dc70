"""The guest's output in the time that production left, and the attribution of the rest.

    residual share = speed beside / (speed alone * (1 - production's core share))
                   = time share * pace

The time share is what the rule granted: the guest's processor time over production's remainder
when alone. The pace is the guest's output per core second, over that of the guest alone:
contention, cold caches, and a machine that was faster in one slice than in the other. Intervals are
Student's t over rounds, each of which has a share of its own. Pure.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.coserve.arms import Arm
from benchmarks.coserve.rounds import Slice
from benchmarks.testbed.round_ratios import student_interval

Amount = Callable[[Slice], float | None]


def residual_figures(slices: Sequence[Slice], arm: Arm, *, base: Arm) -> dict[str, Any]:
    """Figures of one arm, each None if the guest did nothing alone. `base` is production alone."""
    rounds = sorted({each.round for each in slices})
    by_round = [_share([s for s in slices if s.round == number], arm, base) for number in rounds]
    share = _share(slices, arm, base)
    time_share = _share(slices, arm, base, lambda each: each.guest_core_s)
    known = [each for each in by_round if each is not None]
    return {
        "residual_share": share,
        "residual_interval": student_interval(known),
        "time_share": time_share,
        "pace_ratio": None if share is None or not time_share else share / time_share,
        "nothing_in_flight_share": _rate(slices, arm, lambda each: each.idle_s),
    }


def _share(
    slices: Sequence[Slice], arm: Arm, base: Arm, of: Amount = lambda each: each.guest_tokens
) -> float | None:
    """Guest's rate of `of` beside production, over its rate alone times the core share left."""
    beside, alone = _rate(slices, arm, of), _rate(slices, Arm.ROLLOUTS, of)
    used = _rate(slices, base, lambda each: each.production_core_s)
    if beside is None or not alone or used is None or used >= 1.0:
        return None
    return beside / (alone * (1.0 - used))


def _rate(slices: Sequence[Slice], arm: Arm, of: Amount) -> float | None:
    own = [each for each in slices if each.arm is arm]
    amounts = [amount for each in own if (amount := of(each)) is not None]
    if not own or len(amounts) < len(own):
        return None
    return math.fsum(amounts) / math.fsum(each.seconds for each in own)
