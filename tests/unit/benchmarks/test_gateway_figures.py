"""Arithmetic of benchmarks.gateway: the latency that a router adds, and its interval."""

import numpy as np
import pytest

from benchmarks.gateway.comparison import Streams
from benchmarks.gateway.figures import Interval, Outside, added, mean_ratio
from benchmarks.gateway.load import Exchange

SECOND_NS = 1_000_000_000


def exchange(number: int, *, scheduled_ms: float, first_ms: float, last_ms: float) -> Exchange:
    def ns(ms: float) -> int:
        return SECOND_NS + round(ms * 1e6)

    return Exchange(number, ns(scheduled_ms), first_ns=ns(first_ms), last_ns=ns(last_ms))


def test_the_engines_own_time_is_no_cost_of_the_router() -> None:
    sent = [exchange(7, scheduled_ms=0.0, first_ms=12.0, last_ms=103.0)]
    had = {7: [SECOND_NS + 1_000_000, SECOND_NS + 10_000_000, SECOND_NS + 100_000_000]}
    outside = Outside.of(sent, had)
    assert outside.first_ms[0] == pytest.approx(1.0 + 2.0)
    assert outside.whole_ms[0] == pytest.approx(1.0 + 3.0)


def test_a_request_that_leaves_late_waited_outside_the_engine() -> None:
    sent = [exchange(7, scheduled_ms=0.0, first_ms=51.0, last_ms=51.0)]
    had = {7: [SECOND_NS + 50_000_000] * 3}
    assert Outside.of(sent, had).whole_ms[0] == pytest.approx(51.0)


def test_the_direct_arms_share_comes_off_in_its_own_round() -> None:
    random = np.random.default_rng(1)
    direct = [random.exponential(1.0 + drift, 500) for drift in (0.0, 1.0, 4.0, 0.5)]
    router = [window + 0.7 for window in direct]
    found = added(router, direct, percent=99.0)
    assert found.mean == pytest.approx(0.7)
    assert found.low == pytest.approx(0.7)
    assert found.high == pytest.approx(0.7)


@pytest.mark.parametrize("rounds", [3, 5, 8])
@pytest.mark.parametrize("skewed", [False, True])
def test_the_interval_covers_the_mean_as_often_as_it_says(rounds: int, skewed: bool) -> None:
    random = np.random.default_rng(rounds)
    trials, covered = 400, 0
    for _ in range(trials):
        draws = random.lognormal(0.0, 0.5, rounds) if skewed else random.normal(1.0, 0.3, rounds)
        found = Interval.over(draws)
        covered += found.low <= (np.exp(0.125) if skewed else 1.0) <= found.high
    assert 0.88 <= covered / trials <= 0.99


def test_a_ratio_is_the_same_whichever_way_it_is_read() -> None:
    above, below = [1.0, 2.0, 4.0], [2.0, 2.0, 2.0]
    one, other = mean_ratio(above, below), mean_ratio(below, above)
    assert one.mean == pytest.approx(1.0)
    assert one.mean * other.mean == pytest.approx(1.0)


def test_refuses_an_interval_over_one_round() -> None:
    with pytest.raises(ValueError, match="needs two rounds, not 1"):
        Interval.over([1.0])


def test_a_stream_without_a_byte_is_held_by_nothing_and_waited_in_no_figure() -> None:
    """Its `last_ns` is the time at which the run closed it."""
    begun = exchange(7, scheduled_ms=0.0, first_ms=12.0, last_ms=103.0)
    unbegun = Exchange(8, SECOND_NS, last_ns=begun.last_ns)
    had = {
        number: [SECOND_NS, SECOND_NS + 10_000_000, SECOND_NS + 100_000_000] for number in (7, 8)
    }
    outside = Outside.of([begun, unbegun], had)
    assert outside.first_ms == pytest.approx([2.0])
    streams = Streams(router="rosemux", at_s=1.05)

    def check(each: Exchange) -> None:
        if not each.first_ns:
            raise ValueError("no token")

    streams.count([begun, unbegun], check, outside)
    assert (streams.held, streams.faults) == (1, 1)
