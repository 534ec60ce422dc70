"""Bets on which slices were withheld: what they may win without harm, and by a rise."""

import math
import random

import pytest

from harvester.policy.harm_test import (
    HORIZON_S,
    SUSPICION,
    BetWealth,
    QuantileTest,
    RiseLimit,
    ThresholdTest,
)

RUNS = 400


def fair_run(seed: int, *, suspicious: bool) -> float:
    """The stakes' worth after slices whose latencies have nothing to do with their kind."""
    rng, wealth = random.Random(seed), BetWealth()
    for number in range(200):
        share = 0.5 if wealth.newest > SUSPICION else 0.25
        wealth.bet(
            rng.gauss(0.0, 1.0),
            withheld=rng.random() < share,
            share=share,
            slice_s=HORIZON_S / 10_000,
        )
        if suspicious and number % 40 == 0:
            wealth.suspect()
    return wealth.stakes


@pytest.mark.parametrize("suspicious", [False, True])
def test_a_harmless_guest_s_bets_win_nothing_on_average(suspicious: bool) -> None:
    runs = [fair_run(seed, suspicious=suspicious) for seed in range(RUNS)]
    mean = sum(runs) / RUNS
    error = math.sqrt(sum((one - mean) ** 2 for one in runs)) / RUNS
    # Staked: at the start, in 2 % of a horizon, and for five rises.
    staked = 0.1 + 0.02 * 0.3 + suspicious * 5 * 0.05 * 0.3
    assert mean - 3 * error <= staked


def test_the_stakes_of_a_horizon_are_one_whatever_is_suspected() -> None:
    rng, wealth, staked = random.Random(1), BetWealth(), 0.1
    for _ in range(10_000):
        before = wealth.stakes
        wealth.bet(0.0, withheld=rng.random() < 0.5, share=0.5, slice_s=HORIZON_S / 10_000)
        wealth.suspect()
        staked += wealth.stakes - before
    assert staked == pytest.approx(wealth.stakes)
    assert wealth.stakes <= 1.0


def test_a_rise_of_the_median_is_suspected_once() -> None:
    test = QuantileTest()
    for median_s in [0.100, 0.101, 0.099] * 50:
        test.observe(median_s, withheld=False, share=0.05, slice_s=2.0, rise_limit=1.0)
    calm = test.wealths[0].reserve
    for _ in range(2):
        test.observe(0.15, withheld=False, share=0.05, slice_s=2.0, rise_limit=1.0)
    risen = test.wealths[0].reserve
    assert risen < 0.96 * calm
    assert test.wealths[0].newest > SUSPICION
    test.observe(0.15, withheld=False, share=0.05, slice_s=2.0, rise_limit=1.0)
    assert test.wealths[0].reserve >= risen


def test_each_suspicion_makes_the_next_rise_harder_to_believe_and_time_easier() -> None:
    limit, hour_s = RiseLimit(), 3600.0
    assert limit.at(suspected=False) == 1.0
    limit.observe(risen=True, slice_s=2.0)
    raised = limit.at(suspected=False)
    assert raised == pytest.approx(1.5)
    assert limit.at(suspected=True) == 1.0, "the tests that rise next rise as easily"
    limit.observe(risen=False, slice_s=6 * hour_s)
    assert 1.0 < limit.at(suspected=False) < raised
    limit.observe(risen=False, slice_s=24 * hour_s)
    assert limit.at(suspected=False) == 1.0


def serve(
    test: ThresholdTest, *, above: float, withheld: bool = False, newcomer: bool = False
) -> None:
    """One slice of thirty requests."""
    test.observe(
        requests=30,
        above=above,
        withheld=withheld,
        share=0.05,
        slice_s=6.0,
        rise_limit=1.0,
        newcomer=newcomer,
    )


def suspected(test: ThresholdTest) -> bool:
    return any(wealth.newest > SUSPICION for wealth in test.wealths)


def used_to_one_in_a_hundred() -> ThresholdTest:
    test = ThresholdTest()
    for number in range(900):
        serve(test, above=float(number % 3 == 0))
    return test


def test_quiet_withheld_slices_alone_raise_no_suspicion() -> None:
    test = used_to_one_in_a_hundred()
    for _ in range(3):
        serve(test, above=0.0, withheld=True)
    assert not suspected(test)


def test_quiet_withheld_slices_raise_a_suspicion_of_a_newcomer() -> None:
    test = used_to_one_in_a_hundred()
    for _ in range(3):
        serve(test, above=0.0, withheld=True, newcomer=True)
    assert suspected(test)


def test_quiet_withheld_slices_between_slower_ones_raise_a_suspicion() -> None:
    test = used_to_one_in_a_hundred()
    for _ in range(3):
        test.rise.sum = 0.0  # The rise by itself is not what is tested here.
        serve(test, above=6.0)
    assert not suspected(test)
    for _ in range(3):
        serve(test, above=0.0, withheld=True)
    assert suspected(test)


def test_more_requests_above_the_threshold_are_suspected() -> None:
    test = ThresholdTest()
    for number in range(1000):
        serve(test, above=float(number % 20 == 0))
    assert all(wealth.newest < SUSPICION for wealth in test.wealths)
    for _ in range(30):
        serve(test, above=1.0)
    assert all(wealth.newest > SUSPICION for wealth in test.wealths)


def test_lasting_harm_is_no_dispersion() -> None:
    rng, test = random.Random(2), ThresholdTest()
    for rate, slices in ((0.001, 1000), (0.01, 300)):
        for _ in range(slices):
            serve(test, above=float(sum(rng.random() < rate for _ in range(30))))
    assert test.dispersion < 2.0
