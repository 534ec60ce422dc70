from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.testbed.bursts import Bursts, generated_trace
from benchmarks.testbed.trace import Trace
from benchmarks.testbed.window import TokenScale, window_of, windows_of
from harvester.contracts.errors import ConfigError


def trace_of(times: list[float]) -> Trace:
    count = len(times)
    return Trace(
        name="given",
        t_s=np.array(times),
        input_tokens=np.arange(count, dtype=np.int64) * 10,
        output_tokens=np.full(count, 8, dtype=np.int64),
    )


def test_passes_by_the_lull_and_the_burst() -> None:
    lull = list(np.linspace(0, 99, 20))
    steady = list(np.linspace(100, 299, 400))
    burst = list(np.linspace(300, 309, 300))
    trace = trace_of([*lull, *steady, *burst])
    window = window_of(trace, duration_s=50, rate=trace.rate)
    assert 95 <= window.start_s <= 255
    assert window.rate == pytest.approx(trace.rate, rel=0.5)


def test_rounds_pass_by_the_silences_of_a_bursty_trace() -> None:
    """Like the Azure code trace: minutes of requests, minutes of none."""
    spells = [np.linspace(start, start + 120, 600) for start in range(0, 3600, 300)]
    trace = trace_of(np.concatenate(spells).tolist())
    windows = windows_of(trace, count=5, duration_s=30, rate=trace.rate)
    starts = [window.start_s for window in windows]
    assert all(later - earlier >= 30 for earlier, later in pairwise(starts))
    assert all(window.rate == pytest.approx(trace.rate, rel=0.5) for window in windows)


def test_too_few_windows_come_again() -> None:
    trace = trace_of([0.0, *np.linspace(100, 130, 200)])
    windows = windows_of(trace, count=6, duration_s=25, rate=trace.rate)
    assert len(windows) == 6
    assert all(window.arrivals for window in windows)


def test_keeps_gaps_in_proportion_when_replayed_faster() -> None:
    trace = trace_of([0, 1, 3, 7, 8, 12, 13, 16])
    window = window_of(trace, duration_s=8.0, rate=2 * trace.rate)
    assert window.speed == pytest.approx(2.0)
    assert [a.t_s for a in window.arrivals] == pytest.approx([0, 0.5, 1.5, 3.5, 4, 6, 6.5])


def test_scales_to_a_rate_by_stretching_time_alone() -> None:
    trace = generated_trace(Bursts(), duration_s=300, seed=3)
    window = window_of(trace, duration_s=40, rate=5)
    faster = window.scaled(rate=2 * window.rate)
    assert faster.rate == pytest.approx(2 * window.rate)
    assert faster.duration_s == pytest.approx(20)
    assert faster.speed == pytest.approx(2 * window.speed)
    assert [a.input_tokens for a in faster.arrivals] == [a.input_tokens for a in window.arrivals]


def test_spaces_requests_evenly_and_changes_nothing_else_of_them() -> None:
    window = window_of(trace_of([0, 1, 1, 1, 1, 9, 16]), duration_s=16.0, rate=7 / 16)
    even = window.evenly()
    assert [a.t_s for a in even.arrivals] == pytest.approx(
        [place * 16.0 / len(window.arrivals) for place in range(len(window.arrivals))]
    )
    assert [a.input_tokens for a in even.arrivals] == [a.input_tokens for a in window.arrivals]
    assert (even.duration_s, even.rate) == (window.duration_s, window.rate)


def test_scales_token_counts_and_then_clips_them() -> None:
    window = window_of(trace_of([0, 1, 2, 3, 4]), duration_s=4.5, rate=5 / 4)
    sized = window.sized(TokenScale(input_scale=0.5, input_min=4, input_max=12, output_scale=0.25))
    assert [a.input_tokens for a in sized.arrivals] == [4, 5, 10, 12, 12]
    assert {a.output_tokens for a in sized.arrivals} == {2}


def test_begins_a_short_trace_again() -> None:
    trace = trace_of([0, 1, 2, 3])
    window = window_of(trace, duration_s=30, rate=4.0)
    assert len(window.arrivals) == pytest.approx(30 * 4, rel=0.3)
    assert [a.input_tokens for a in window.arrivals[:6]] == [0, 10, 20, 30, 0, 10]


def test_refuses_more_requests_than_a_demo_can_replay() -> None:
    with pytest.raises(ConfigError, match="too many"):
        window_of(trace_of([0, 1]), duration_s=1e6, rate=1.0)


@given(
    gaps=st.lists(st.floats(0, 50), min_size=2, max_size=80).filter(lambda gaps: sum(gaps) > 1),
    duration_s=st.floats(1, 60),
    rate=st.floats(0.5, 20),
)
def test_every_window_is_ordered_inside_itself_and_numbered(
    gaps: list[float], duration_s: float, rate: float
) -> None:
    trace = trace_of(np.cumsum([0.0, *gaps]).tolist())
    try:
        window = window_of(trace, duration_s=duration_s, rate=rate)
    except ConfigError:
        return
    times = [arrival.t_s for arrival in window.arrivals]
    assert times == sorted(times)
    assert times[0] >= -1e-9
    assert times[-1] <= duration_s * (1 + 1e-9)
    assert [arrival.index for arrival in window.arrivals] == list(range(len(times)))
    assert window == window_of(trace, duration_s=duration_s, rate=rate)
