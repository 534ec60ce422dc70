from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.testbed.interleaving import cycle_rounds, interleaved


@pytest.mark.parametrize("arms", [2, 3, 5, 6, 9])
def test_each_arm_follows_each_other_equally_often_and_has_each_place(arms: int) -> None:
    rounds: dict[int, list[int]] = {}
    for arm, turn in interleaved(range(arms), cycle_rounds(arms)):
        rounds.setdefault(turn, []).append(arm)
    pairs = Counter(pair for row in rounds.values() for pair in pairwise(row))
    places = Counter(place for row in rounds.values() for place in enumerate(row))
    assert len(pairs) == arms * (arms - 1)
    assert len(set(pairs.values())) == 1
    assert len(places) == arms * arms
    assert len(set(places.values())) == 1


@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_every_arm_comes_once_in_each_round(rounds: int) -> None:
    plan = list(interleaved("abcdefghi", rounds))
    assert len(set(plan)) == len(plan) == rounds * 9
    assert [turn for _, turn in plan[::9]] == list(range(rounds))


def test_a_resumed_run_goes_on_with_the_orders_that_are_left() -> None:
    whole = list(interleaved("abc", 6))
    assert [*interleaved("abc", 2), *interleaved("abc", 6, first=2)] == whole
    assert list(interleaved("a", 2)) == [("a", 0), ("a", 1)]
