"""The bias test of benchmarks.migration: calibrated without bias, powerful with it."""

import numpy as np
import pytest

from benchmarks.migration.bias import (
    LEAST_P,
    Sample,
    dropping_moved,
    p_values,
    paired_p_value,
    power,
)
from benchmarks.migration.bias_run import bias_faults, judged_bias
from benchmarks.migration.verdict import CONVICTING

STOP_P = 0.06
PAIRS = 1500
MOVES_PER_TOKEN = 0.04


def arm(random: np.random.Generator, *, moving: bool, pairs: int = PAIRS) -> list[Sample]:
    """Geometric lengths of at most 64 tokens; long turns are moved more often."""
    samples = []
    for pair in range(pairs):
        length = min(64, int(random.geometric(STOP_P)))
        ids = random.integers(0, 500, size=length).tolist()
        moves = int(random.binomial(length, MOVES_PER_TOKEN)) if moving else 0
        samples.append(Sample.of(str(pair), ids, moves=moves))
    return samples


def test_p_values_without_bias_are_uniform_even_with_ties() -> None:
    random = np.random.default_rng(1)
    found = []
    for seed in range(300):
        both = np.minimum(64, random.geometric(0.3, size=(2, 80))).astype(float)
        found.append(paired_p_value(*both, seed=seed, permutations=200))
    for level in (0.05, 0.1, 0.25, 0.5):
        share = np.mean(np.array(found) <= level)
        # Never more than the level, but for four standard errors; and not uselessly fewer.
        error = np.sqrt(level * (1 - level) / len(found))
        assert level - 6 * error < share < level + 4 * error


def test_the_combined_p_value_rejects_an_unbiased_policy_as_rarely_as_it_says() -> None:
    random = np.random.default_rng(2)
    found = [
        p_values(
            arm(random, moving=False, pairs=60),
            arm(random, moving=True, pairs=60),
            seed=seed,
            permutations=200,
        )["bias"]
        for seed in range(200)
    ]
    assert np.mean(np.array(found) <= 0.05) < 0.05 + 4 * np.sqrt(0.05 * 0.95 / 200)


def test_a_shape_that_differs_at_the_same_mean_is_seen() -> None:
    random = np.random.default_rng(3)
    narrow, wide = random.normal(20, 1, size=400), random.normal(20, 6, size=400)
    assert paired_p_value(narrow, wide, seed=1) < 0.01


@pytest.mark.parametrize("policy", ["dropping_moved", "first_finished"])
def test_a_policy_that_favours_unmoved_turns_is_caught(policy: str) -> None:
    random = np.random.default_rng(4)
    calm, moved = arm(random, moving=False), arm(random, moving=True)
    assert power(calm, moved, policy=policy, seed=5, rounds=20) > 0.9


def test_the_least_p_value_of_a_biased_run_convicts_it() -> None:
    calm = [Sample.of(str(pair), [3] * 11) for pair in range(PAIRS)]
    moved = [Sample.of(str(pair), [3] * 61, moves=pair % 2) for pair in range(PAIRS)]
    report = judged_bias({"calm": calm, "moved": moved}, seed=1, power_rounds=1)
    assert report["bias_p_value"] < LEAST_P / 4
    assert report["length_moved_less_calm"] == {"mean": 50.0, "low": 50.0, "high": 50.0}
    verdict = dict.fromkeys(CONVICTING, 0)
    draws = {"draws": {}, "power_of_draws": {}}
    faults = bias_faults(report | {"verdict": verdict} | draws)
    assert "bias_p_value" in faults


def test_a_policy_that_keeps_all_turns_is_not() -> None:
    random = np.random.default_rng(6)
    calm, moved = arm(random, moving=False), arm(random, moving=True)
    assert p_values(calm, moved, seed=7)["bias"] > 0.01
    dropped = dropping_moved(moved, calm, random)
    assert 0 < len(dropped) < len(moved)


def test_the_report_names_both_arms_and_the_power_against_each_policy() -> None:
    random = np.random.default_rng(8)
    samples = {"calm": arm(random, moving=False), "moved": arm(random, moving=True)}
    report = judged_bias(samples, seed=9, power_rounds=12)
    assert report["bias_p_value"] > 0.01
    assert report["moved_turns"]["calm"] == 0 < report["moved_turns"]["moved"]
    caught = report["power_against"]
    assert min(caught["dropping_moved"], caught["first_finished"]) > 0.9
    assert caught["losing_ends"] > 0.4, "with 1,500 turns an arm"
