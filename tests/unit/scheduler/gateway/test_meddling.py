"""An engine with weights changed by others: one warning, and longer pauses each time."""

import pytest

from scheduler.gateway.identity import Change, change_between
from scheduler.gateway.policy.meddling import FORGOTTEN_S, Meddling


def test_once_costs_no_wait_and_again_costs_ever_more() -> None:
    meddling = Meddling()
    assert meddling.seen(now=0)
    assert meddling.may_return(now=0)
    waits = []
    for _ in range(9):
        assert not meddling.seen(now=10), "told once"
        waits.append(meddling.until_s - 10)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert not meddling.may_return(now=69)
    assert meddling.may_return(now=70)


def test_a_foreign_change_after_the_memory_s_end_is_reported_again() -> None:
    meddling = Meddling()
    meddling.seen(now=0)
    meddling.seen(now=1)
    assert meddling.seen(now=2 + FORGOTTEN_S)
    assert meddling.may_return(now=2 + FORGOTTEN_S)


@pytest.mark.parametrize(
    ("told", "change"),
    [
        ("a1.4", Change.NONE),
        ("a1.6", Change.WEIGHTS),
        ("b2.4", Change.PROCESS),
        ("", Change.PROCESS),
        ("a1", Change.PROCESS),
    ],
)
def test_a_process_with_other_weights_differs_from_another_process(
    told: str, change: Change
) -> None:
    assert change_between("a1.4", told) is change


def test_a_start_time_with_a_fraction_is_no_count_of_weight_calls() -> None:
    given, told = "started 1700000000.25", "started 1700000000.75"
    assert change_between(given, told) is Change.PROCESS
