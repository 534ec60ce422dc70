"""Intervals over rounds: what they cover on a machine of two speeds, where nothing else differs."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.testbed.bootstrap import Latencies, ratio_interval
from benchmarks.testbed.interleaving import interleaved
from benchmarks.testbed.round_ratios import (
    STATISTICS,
    over_rounds,
    round_ratio,
    student_interval,
)

Interval = tuple[float, float] | None
Trial = tuple[Latencies, Latencies]
TRIALS = 150
ROUNDS, REQUESTS, ARMS = 10, 80, 5
"""A quarter of an hour with the arms of the goals."""
SLICE_S, BETWEEN_S = 10.0, 4.0
SLOW = 30 / 17
"""A loop of Python takes 17 or 30 ms on such a machine."""
COVERED_MIN = 0.9


def null_trial(rng: np.random.Generator, *, dwell_s: float) -> Trial:
    """Two arms of an interleaved run with the same requests and the same rule. Only the machine
    differs: it changes its speed after `dwell_s` in the mean."""
    changes_s = np.cumsum(rng.exponential(dwell_s, size=4000))
    begins_slow = rng.integers(2)
    alone = rng.lognormal(-3.0, 0.5, size=(ROUNDS, REQUESTS))
    found: dict[int, list[NDArray[np.float64]]] = {0: [], 1: []}
    for place, (arm, turn) in enumerate(interleaved(range(ARMS), ROUNDS)):
        if arm in found:
            start_s = place * (SLICE_S + BETWEEN_S)
            due_s = start_s + np.sort(rng.random(REQUESTS)) * SLICE_S
            slow = (np.searchsorted(changes_s, due_s) + begins_slow) % 2
            noise = rng.lognormal(0.0, 0.1, REQUESTS)
            found[arm].append(alone[turn] * np.where(slow, SLOW, 1.0) * noise)
    units = tuple((turn, place // 10) for turn in range(ROUNDS) for place in range(REQUESTS))
    return Latencies(np.concatenate(found[0]), units), Latencies(np.concatenate(found[1]), units)


def coverage(interval: Callable[[Latencies, Latencies], Interval], *, dwell_s: float) -> float:
    held = 0
    for seed in range(TRIALS):
        found = interval(*null_trial(np.random.default_rng(seed), dwell_s=dwell_s))
        held += found is not None and found[0] <= 1.0 <= found[1]
    return held / TRIALS


def by_rounds(above: Latencies, below: Latencies, *, statistic: str) -> Interval:
    return round_ratio(above, below, STATISTICS[statistic]).interval


@pytest.mark.parametrize("dwell_s", [10.0, 60.0, 200.0])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_95_percent_interval_holds_the_truth_nine_times_in_ten(
    statistic: str, dwell_s: float
) -> None:
    assert coverage(partial(by_rounds, statistic=statistic), dwell_s=dwell_s) >= COVERED_MIN


def test_requests_as_the_unit_of_resampling_would_not() -> None:
    by_stretches = partial(ratio_interval, percent=50, seed=1)
    assert coverage(by_stretches, dwell_s=60.0) < COVERED_MIN


def test_a_slower_arm_is_found_where_the_machine_keeps_its_speed() -> None:
    above, below = null_trial(np.random.default_rng(1), dwell_s=1e9)
    slower = Latencies(1.05 * above.values_s, above.units)
    found = round_ratio(slower, below, STATISTICS["mean"])
    assert found.interval is not None
    assert 1.0 < found.interval[0] < 1.05 < found.interval[1]
    assert found.half_width == pytest.approx((found.interval[1] - found.interval[0]) / 2)


def test_one_round_gives_a_ratio_and_no_interval() -> None:
    one = over_rounds([1.1])
    assert (one.ratio, one.interval, one.half_width) == (pytest.approx(1.1), None, None)
    assert over_rounds([]).ratio is over_rounds([0.0, float("nan")]).ratio is None


def test_an_interval_is_wider_with_fewer_rounds() -> None:
    few, many = student_interval([1.0, 1.2]), student_interval([1.0, 1.2] * 10)
    assert few is not None
    assert many is not None
    assert few[0] < many[0] < 1.1 < many[1] < few[1]


def test_a_round_without_a_partner_says_nothing() -> None:
    three = Latencies(np.array([1.0, 2.0, 9.0]), ((0, 0), (1, 0), (2, 0)))
    two = Latencies(np.array([1.0, 1.0]), ((0, 0), (1, 0)))
    assert round_ratio(three, two, STATISTICS["p50"]).ratio == pytest.approx(2.0**0.5)
