"""The guest's output in the time that production left, and the attribution of the rest.

    residual share = speed beside / (speed alone * (1 - production's core share))
                   = time share * pace

The time share is what the rule granted: the guest's processor time over production's remainder
when alone. The pace is the guest's output per core second, over that of the guest alone:
contention, cold caches, and a machine that was faster in one slice than in the other. Intervals are
of the jackknife over rounds; where the machine's speed in each slice is known, share and interval
are of equal speeds. Pure.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.coserve.arms import Arm
from benchmarks.coserve.rounds import ArmSlice, slower_by_round
from benchmarks.testbed.round_ratios import jackknife_ratio

Amount = Callable[[ArmSlice], float | None]


def residual_figures(slices: Sequence[ArmSlice], arm: Arm, *, base: Arm) -> dict[str, Any]:
    """Figures of one arm, each None if the guest did nothing alone. `base` is production alone."""
    rounds = sorted({each.round for each in slices})
    by_round = [[each for each in slices if each.round == number] for number in rounds]

    def share_of(kept: NDArray[np.bool_]) -> float | None:
        chosen = [each for place in np.flatnonzero(kept) for each in by_round[place]]
        return share(chosen, arm, base)

    whole = share_of(np.ones(len(rounds), dtype=bool))
    time_share = share(slices, arm, base, lambda each: each.guest_core_s)
    speeds = [slower_by_round(slices, each, Arm.ROLLOUTS) for each in (arm, base)]
    known = all(number in slower for slower in speeds for number in rounds)
    columns = np.array([[slower[each] for slower in speeds] for each in rounds] if known else ())
    found = jackknife_ratio(len(rounds), share_of, columns)
    return {
        # A share that is no positive number has no logarithm.
        "residual_share": whole if found.ratio is None else found.ratio,
        "residual_interval": found.interval,
        "time_share": time_share,
        "pace_ratio": None if whole is None or not time_share else whole / time_share,
        "nothing_in_flight_share": _rate(slices, arm, lambda each: each.idle_s),
    }


def share(
    slices: Sequence[ArmSlice], arm: Arm, base: Arm, of: Amount = lambda each: each.guest_tokens
) -> float | None:
    """Guest's rate of `of` beside production, over its rate alone times the core share left."""
    beside, alone = _rate(slices, arm, of), _rate(slices, Arm.ROLLOUTS, of)
    used = _rate(slices, base, lambda each: each.production_core_s)
    if beside is None or not alone or used is None or used >= 1.0:
        return None
    return beside / (alone * (1.0 - used))


def _rate(slices: Sequence[ArmSlice], arm: Arm, of: Amount) -> float | None:
    own = [each for each in slices if each.arm is arm]
    amounts = [amount for each in own if (amount := of(each)) is not None]
    if not own or len(amounts) < len(own):
        return None
    return math.fsum(amounts) / math.fsum(each.seconds for each in own)
