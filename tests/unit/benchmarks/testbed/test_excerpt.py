from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.testbed.bursts import Bursts, generated_trace
from benchmarks.testbed.excerpt import TokenScale, excerpt_of, excerpts_of
from benchmarks.testbed.trace import Trace
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
    excerpt = excerpt_of(trace, duration_s=50, rate=trace.rate)
    assert 95 <= excerpt.start_s <= 255
    assert excerpt.rate == pytest.approx(trace.rate, rel=0.5)


def test_rounds_pass_by_the_silences_of_a_bursty_trace() -> None:
    """Like the Azure code trace: minutes of requests, minutes of none."""
    spells = [np.linspace(start, start + 120, 600) for start in range(0, 3600, 300)]
    trace = trace_of(np.concatenate(spells).tolist())
    excerpts = excerpts_of(trace, count=5, duration_s=30, rate=trace.rate)
    starts = [excerpt.start_s for excerpt in excerpts]
    assert all(later - earlier >= 30 for earlier, later in pairwise(starts))
    assert all(excerpt.rate == pytest.approx(trace.rate, rel=0.5) for excerpt in excerpts)


def test_too_few_excerpts_come_again() -> None:
    trace = trace_of([0.0, *np.linspace(100, 130, 200)])
    excerpts = excerpts_of(trace, count=6, duration_s=25, rate=trace.rate)
    assert len(excerpts) == 6
    assert all(excerpt.arrivals for excerpt in excerpts)


def test_keeps_gaps_in_proportion_when_replayed_faster() -> None:
    trace = trace_of([0, 1, 3, 7, 8, 12, 13, 16])
    excerpt = excerpt_of(trace, duration_s=8.0, rate=2 * trace.rate)
    assert excerpt.speed == pytest.approx(2.0)
    assert [a.t_s for a in excerpt.arrivals] == pytest.approx([0, 0.5, 1.5, 3.5, 4, 6, 6.5])


def test_scales_to_a_rate_by_stretching_time_alone() -> None:
    trace = generated_trace(Bursts(), duration_s=300, seed=3)
    excerpt = excerpt_of(trace, duration_s=40, rate=5)
    faster = excerpt.scaled(rate=2 * excerpt.rate)
    assert faster.rate == pytest.approx(2 * excerpt.rate)
    assert faster.duration_s == pytest.approx(20)
    assert faster.speed == pytest.approx(2 * excerpt.speed)
    assert [a.input_tokens for a in faster.arrivals] == [a.input_tokens for a in excerpt.arrivals]


def test_spaces_requests_evenly_and_changes_nothing_else_of_them() -> None:
    excerpt = excerpt_of(trace_of([0, 1, 1, 1, 1, 9, 16]), duration_s=16.0, rate=7 / 16)
    even = excerpt.evenly()
    assert [a.t_s for a in even.arrivals] == pytest.approx(
        [place * 16.0 / len(excerpt.arrivals) for place in range(len(excerpt.arrivals))]
    )
    assert [a.input_tokens for a in even.arrivals] == [a.input_tokens for a in excerpt.arrivals]
    assert (even.duration_s, even.rate) == (excerpt.duration_s, excerpt.rate)


def test_scales_token_counts_and_then_clips_them() -> None:
    excerpt = excerpt_of(trace_of([0, 1, 2, 3, 4]), duration_s=4.5, rate=5 / 4)
    sized = excerpt.sized(TokenScale(input_scale=0.5, input_min=4, input_max=12, output_scale=0.25))
    assert [a.input_tokens for a in sized.arrivals] == [4, 5, 10, 12, 12]
    assert {a.output_tokens for a in sized.arrivals} == {2}


def test_begins_a_short_trace_again() -> None:
    trace = trace_of([0, 1, 2, 3])
    excerpt = excerpt_of(trace, duration_s=30, rate=4.0)
    assert len(excerpt.arrivals) == pytest.approx(30 * 4, rel=0.3)
    assert [a.input_tokens for a in excerpt.arrivals[:6]] == [0, 10, 20, 30, 0, 10]


def test_refuses_more_requests_than_a_demo_can_replay() -> None:
    with pytest.raises(ConfigError, match="too many"):
        excerpt_of(trace_of([0, 1]), duration_s=1e6, rate=1.0)


@given(
    gaps=st.lists(st.floats(0, 50), min_size=2, max_size=80).filter(lambda gaps: sum(gaps) > 1),
    duration_s=st.floats(1, 60),
    rate=st.floats(0.5, 20),
)
def test_every_excerpt_is_ordered_inside_itself_and_numbered(
    gaps: list[float], duration_s: float, rate: float
) -> None:
    trace = trace_of(np.cumsum([0.0, *gaps]).tolist())
    try:
        excerpt = excerpt_of(trace, duration_s=duration_s, rate=rate)
    except ConfigError:
        return
    times = [arrival.t_s for arrival in excerpt.arrivals]
    assert times == sorted(times)
    assert times[0] >= -1e-9
    assert times[-1] <= duration_s * (1 + 1e-9)
    assert [arrival.index for arrival in excerpt.arrivals] == list(range(len(times)))
    assert excerpt == excerpt_of(trace, duration_s=duration_s, rate=rate)
