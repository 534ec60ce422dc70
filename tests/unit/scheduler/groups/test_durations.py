"""Beliefs about phase durations: wide before anything ran, narrow after, following a drift."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.groups.durations import PhaseEstimate


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
