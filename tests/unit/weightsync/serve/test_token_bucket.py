"""The bandwidth cap holds over every stretch of time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import ConfigError
from weightsync.serve.server import TokenBucket

takes = st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 3)), min_size=1, max_size=60)


@given(takes, st.floats(1, 10_000))
def test_no_stretch_of_time_carries_more_than_burst_and_rate(
    asked: list[tuple[int, float]], rate: float
) -> None:
    bucket, now, sent = TokenBucket(rate, burst_bytes=rate), 0.0, []
    for size, pause in asked:
        now += pause
        sent.append((now + bucket.take(size, now=now), size))
    assert sent == sorted(sent, key=lambda each: each[0]), "first come, first served"
    for at, (began, _) in enumerate(sent):
        carried = 0
        for ended, size in sent[at:]:
            carried += size
            # The piece that begins the stretch may have been paid for before it.
            assert carried - sent[at][1] <= rate + rate * (ended - began) + 1e-6 * carried


@given(takes)
def test_below_the_rate_nothing_waits(asked: list[tuple[int, float]]) -> None:
    bucket, now = TokenBucket(5000, burst_bytes=5000), 0.0
    for size, pause in asked:
        now += 1.0 + pause
        assert bucket.take(size, now=now) == 0.0


def test_a_clock_that_stands_still_or_goes_back_earns_nothing() -> None:
    bucket = TokenBucket(100, burst_bytes=100)
    assert bucket.take(100, now=10.0) == 0.0
    assert bucket.take(100, now=5.0) == 1.0
    assert bucket.take(100, now=10.0) == 2.0


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_cap_of_nothing_is_a_mistake(rate: float) -> None:
    with pytest.raises(ConfigError, match="more than 0"):
        TokenBucket(rate)
