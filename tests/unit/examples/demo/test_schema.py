import json
from typing import Any

import pytest

from examples.demo.records import ArmBlock, Record
from examples.demo.result import DemoFacts, as_json, result_of
from examples.demo.schema import Result, problems


@pytest.fixture
def plain(whole_result: Result) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(as_json(whole_result)))
    return loaded


def test_a_whole_run_has_no_problems_even_with_keys_of_later_versions(
    plain: dict[str, Any],
) -> None:
    plain["later"] = 1
    plain["slo"]["later"] = 1
    del plain["checks"]
    assert problems(plain) == []


def test_one_round_bounds_no_interval_which_is_no_problem(
    whole_run: tuple[Record, ...], facts: DemoFacts
) -> None:
    """As with `--quick`."""
    first = [
        record
        for record in whole_run
        if (record.index if isinstance(record, ArmBlock) else record.block) == 0
    ]
    result = result_of(first, facts)
    plain = json.loads(json.dumps(as_json(result)))
    assert problems(plain) == []
    assert set(plain["intervals"].values()) == {None}
    reported = [check for check in result.checks if "P99" in check.name]
    assert [(check.ok, check.limit) for check in reported] == [
        (True, "reported: too few rounds for an interval")
    ] * 2


def test_every_missing_key_is_named(plain: dict[str, Any]) -> None:
    del plain["ratios"]
    del plain["harvest"]["reward_se"]
    found = problems(plain)
    assert any("ratios is missing" in problem for problem in found)
    assert any("harvest" in problem and "reward_se" in problem for problem in found)


@pytest.mark.parametrize(
    ("part", "key", "value", "said"),
    [
        ("fixed", "ttft_p50_ms", None, "fixed.ttft_p50_ms is null"),
        ("intervals", "itl_p99", [0.9], "intervals: Expected `array` of length 2, got 1"),
        ("harvest", "failed", 2, "harvest.failed is 2, must be 0"),
        ("onpolicy", "stale_tokens", 1, "onpolicy.stale_tokens is 1, must be 0"),
        ("trajectories", "lost", 1, "trajectories.lost is 1, must be 0"),
        ("weights", "hash_mismatches", 1, "weights.hash_mismatches is 1, must be 0"),
        ("harvest", "steps", 0, "harvest.steps is 0, must be more than 0"),
        ("fixed", "steps", "3", "fixed: Expected `int`, got `str`"),
        ("ratios", "ttft_p50", float("nan"), "not a number"),
    ],
)
def test_a_wrong_figure_is_named_with_its_fault(
    plain: dict[str, Any], part: str, key: str, value: object, said: str
) -> None:
    plain[part][key] = value
    (problem,) = problems(plain)
    assert said in problem


def test_null_and_zero_seconds_to_the_first_token_are_problems(plain: dict[str, Any]) -> None:
    plain["seconds_to_first_harvested_token"] = None
    assert len(problems(plain)) == 1
    plain["seconds_to_first_harvested_token"] = 0.0
    assert len(problems(plain)) == 1
