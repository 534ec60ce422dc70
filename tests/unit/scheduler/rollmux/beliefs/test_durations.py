"""Beliefs about phase durations: wide before anything ran, narrow after, following a drift."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model import PhaseKind
from scheduler.rollmux.beliefs.durations import PhaseEstimate
from scheduler.rollmux.beliefs.facts import JobFacts
from tests.unit.scheduler.rollmux.planner.planned_jobs import planned_job


def _seen(max_s: float, *durations_s: float) -> PhaseEstimate:
    estimate = PhaseEstimate(max_s)
    for solo_s in durations_s:
        estimate.observe(solo_s)
    return estimate


def test_a_young_job_is_believed_anywhere_from_half_its_maximum_to_all_of_it() -> None:
    young = _seen(400.0)
    assert young.mean_s - 2 * young.mean_spread_s < 200.0
    assert young.mean_s + 2 * young.mean_spread_s > 400.0


@given(st.floats(10.0, 1000.0), st.floats(0.5, 1.0), st.integers(5, 60))
def test_the_doubt_shrinks_and_the_mean_approaches_what_was_seen(
    max_s: float, ratio: float, count: int
) -> None:
    seen = _seen(max_s, *[ratio * max_s] * count)
    assert abs(seen.mean_s / (ratio * max_s) - 1) < 0.05
    assert seen.mean_spread_s < _seen(max_s, ratio * max_s).mean_spread_s


def test_a_drifting_mean_is_followed_and_the_doubt_never_vanishes() -> None:
    seen = _seen(400.0, *[200.0] * 200, *[390.0] * 200)
    assert 385.0 < seen.mean_s < 395.0
    assert seen.mean_spread_s > 0.0


def test_variation_is_learned_from_the_observations() -> None:
    calm, wild = _seen(400.0, *[200.0] * 60), _seen(400.0, *[150.0, 250.0] * 30)
    assert calm.cv < 0.05
    assert 0.2 < wild.cv < 0.3


@pytest.mark.parametrize("end_ratio", [0.5, 2.0])
def test_a_steady_drift_is_followed_without_the_lag_of_a_faded_mean(end_ratio: float) -> None:
    noise = 1.0 + 0.08 * np.random.Generator(np.random.PCG64(7)).standard_normal(150)
    means_s = np.linspace(300.0, 300.0 * end_ratio, 150)
    seen = _seen(400.0, *(means_s * noise).tolist())
    assert seen.mean_s == pytest.approx(means_s[-1], rel=0.07)
    assert abs(seen.seen_s / means_s[-1] - 1.0) > 0.1
    assert seen.cv == pytest.approx(0.08, rel=0.3)


def test_chance_is_hardly_ever_taken_for_a_drift() -> None:
    rng = np.random.Generator(np.random.PCG64(7))
    taken = 0
    for _ in range(100):
        seen = PhaseEstimate(400.0)
        for solo_s in (300.0 * (1.0 + 0.08 * rng.standard_normal(200))).tolist():
            seen.observe(solo_s)
            taken += seen.drift_s != 0.0
    assert taken < 20


def test_a_drift_is_doubted_more_than_a_mean_and_never_takes_it_past_twice_or_half() -> None:
    noise = np.array([0.95, 1.05] * 20)
    steady = _seen(400.0, *(200.0 * noise).tolist())
    rising = _seen(400.0, *(np.linspace(100.0, 300.0, 40) * noise).tolist())
    falling = _seen(400.0, *[1000.0] * 40, *[1.0] * 40)
    assert rising.drift_s > 0.0
    assert rising.mean_spread_s > 1.5 * steady.mean_spread_s
    assert falling.mean_s >= falling.seen_s / 2


def test_one_phase_of_hours_among_ones_of_minutes_teaches_and_earns_little() -> None:
    facts = JobFacts.of(planned_job("a", 300.0, 300.0), cold_start_s=0.0, now=0.0)
    for _ in range(40):
        facts.observe(PhaseKind.ROLLOUT, 300.0)
        facts.observe(PhaseKind.TRAINING, 300.0)
    earned_s = facts.account.solo_s
    facts.observe(PhaseKind.ROLLOUT, 18_000.0)
    facts.observe_cut(PhaseKind.TRAINING, 18_000.0)
    assert facts.account.solo_s - earned_s == pytest.approx(3 * 300.0 / 0.8)
    for belief in (facts.rollout, facts.training):
        assert belief.mean_s < 350.0
        assert belief.cv < 0.6
    declared_too_short = JobFacts.of(planned_job("b", 10.0, 10.0), cold_start_s=0.0, now=0.0)
    for _ in range(8):
        declared_too_short.observe(PhaseKind.ROLLOUT, 100.0)
    assert declared_too_short.rollout.mean_s > 80.0
