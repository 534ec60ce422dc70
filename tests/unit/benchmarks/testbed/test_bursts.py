import numpy as np
import pytest

from benchmarks.testbed.bursts import Bursts, generated_trace


def test_same_seed_same_trace_and_another_seed_another() -> None:
    first, again, other = (generated_trace(Bursts(), duration_s=200, seed=s) for s in (1, 1, 2))
    assert first.t_s.tolist() == again.t_s.tolist()
    assert first.input_tokens.tolist() == again.input_tokens.tolist()
    assert first.t_s.tolist() != other.t_s.tolist()


def test_is_bursty_heavy_tailed_and_of_the_requested_rate() -> None:
    trace = generated_trace(Bursts(rate=4.0), duration_s=4000, seed=7)
    per_second = np.bincount(trace.t_s.astype(int))
    assert trace.rate == pytest.approx(4.0, rel=0.15)
    # A Poisson process would have 1.
    assert per_second.var() / per_second.mean() > 2
    assert np.percentile(trace.output_tokens, 99) > 5 * np.median(trace.output_tokens)
    assert (np.diff(trace.t_s) >= 0).all()


def test_gives_a_trace_with_a_length_however_short() -> None:
    trace = generated_trace(Bursts(rate=0.01), duration_s=0.5, seed=1)
    assert len(trace.t_s) >= 2
    assert trace.duration_s > 0


def test_refuses_a_state_that_never_ends_or_never_comes() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Bursts(burst_s=0)
