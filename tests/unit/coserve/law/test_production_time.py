"""Upper lines over production's own step times."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from coserve.law.production_time import ProductionTime, upper_line


def test_finds_the_line_of_exact_steps() -> None:
    times = ProductionTime()
    for size in range(1, 41):
        times.observe_prefill(tokens=10 * size, seconds=0.010 + 0.0001 * 10 * size)
        times.observe_decode(requests=size, seconds=0.004 + 0.0005 * size)
    model = times.fit()
    assert model.prefill_s(1000) == pytest.approx(0.110)
    assert model.decode_s(16) == pytest.approx(0.012)
    assert times.samples == 80


def test_says_nothing_before_there_are_enough_samples() -> None:
    times = ProductionTime()
    for size in range(19):
        times.observe_prefill(tokens=size, seconds=1.0)
    assert times.fit().prefill_s(100) == 0.0
    times.observe_prefill(tokens=19, seconds=1.0)
    assert times.fit().prefill_s(100) > 0.0


def test_the_configured_share_of_steps_lies_below_the_line() -> None:
    rng = random.Random(1)
    points = [
        (size, (0.01 + 0.001 * size) * rng.lognormvariate(0, 0.3))
        for size in (rng.randint(1, 200) for _ in range(512))
    ]
    intercept, slope = upper_line(points, 0.9)
    below = sum(y <= intercept + slope * x + 1e-12 for x, y in points) / len(points)
    assert below == pytest.approx(0.9, abs=0.01)


def test_steps_that_grow_faster_than_their_size_have_the_best_line_without_negative_terms() -> None:
    sizes = np.arange(100, 2100, 50)
    seconds = 1e-7 * sizes**2.0
    wanted, _ = nnls(np.column_stack([np.ones(len(sizes)), sizes]), seconds)
    points = list(zip(sizes.tolist(), seconds.tolist(), strict=True))
    assert upper_line(points, 0.0) == pytest.approx(tuple(wanted))


def test_one_prompt_size_makes_a_flat_line() -> None:
    assert upper_line([(64, 0.05)] * 30, 0.9) == (pytest.approx(0.05), 0.0)


def test_forgets_what_left_the_window() -> None:
    times = ProductionTime()
    for _ in range(600):
        times.observe_decode(requests=4, seconds=0.1)
    for _ in range(512):
        times.observe_decode(requests=4, seconds=0.01)
    assert times.fit().decode_s(4) == pytest.approx(0.01)


def test_each_step_is_compared_with_the_model_that_had_not_seen_it() -> None:
    times = ProductionTime()
    for _ in range(30):
        times.observe_decode(requests=4, seconds=0.01)
    assert times.decode_calibration.summary().steps == 0, "there was no model yet"
    times.fit()
    for step in range(100):
        times.observe_decode(requests=4, seconds=0.02 if step % 10 == 0 else 0.005)
    found = times.decode_calibration.summary()
    assert (found.steps, found.over_ratio) == (100, pytest.approx(0.1))
    assert (found.p50_ratio, found.p99_ratio) == (pytest.approx(0.5), pytest.approx(2.0))
    assert times.prefill_calibration.summary().steps == 0


def test_a_model_of_steady_steps_is_calibrated_for_both_kinds() -> None:
    rng, times = random.Random(3), ProductionTime()
    for second in range(20):
        for _ in range(60):
            tokens, requests = rng.randint(1, 400), rng.randint(1, 30)
            noise = rng.lognormvariate(0, 0.2)
            times.observe_prefill(tokens=tokens, seconds=(0.01 + 1e-4 * tokens) * noise)
            times.observe_decode(requests=requests, seconds=(0.004 + 5e-4 * requests) * noise)
        times.fit()
        if second == 10:
            early = times.prefill_calibration.summary().steps
    assert early == 512, "and of a bounded number"
    for window in (times.prefill_calibration, times.decode_calibration):
        found = window.summary()
        assert found.over_ratio == pytest.approx(0.1, abs=0.04)
        assert found.p90_ratio == pytest.approx(1.0, abs=0.08)
        assert found.p50_ratio < found.p90_ratio < found.p99_ratio


@given(
    st.lists(st.tuples(st.integers(0, 100_000), st.floats(0.0, 100.0)), min_size=0, max_size=100),
    st.floats(0.0, 1.0),
)
def test_a_line_is_never_negative_and_never_falls(
    points: list[tuple[int, float]], quantile: float
) -> None:
    intercept, slope = upper_line(points, quantile)
    assert intercept >= 0.0
    assert slope >= 0.0
