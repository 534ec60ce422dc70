"""The pace of work beside production that is no engine step."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from coserve.law.work_gate import SHARE, WorkPace, work_budget_s
from harvester.contracts.page import Grant, GrantMode, PageFault, PulseHead, Reading

NOW_NS = 1_000_000_000_000

MakeGrant = Callable[..., Grant]
Whole = Callable[[Any], Reading[Any]]


def busy(**fields: Any) -> PulseHead:
    return PulseHead(
        **{"in_flight": 1, "decoding": 1, "last_step_end_ns": NOW_NS - 190_000_000} | fields
    )


def test_idle_production_leaves_what_a_phantom_leaves(make_grant: MakeGrant, whole: Whole) -> None:
    grant = make_grant()
    budget_s = work_budget_s(whole(grant), [whole(PulseHead())], now_ns=NOW_NS)
    assert 0.9 < budget_s < 1.0


def test_production_that_needs_the_machine_leaves_nothing(
    make_grant: MakeGrant, whole: Whole
) -> None:
    assert work_budget_s(whole(make_grant()), [whole(busy())], now_ns=NOW_NS) < 0.01


def test_a_closed_grant_says_as_much_of_production_as_an_open_one(
    make_grant: MakeGrant, whole: Whole
) -> None:
    """A sleeping guest, or one without a lease, still follows versions."""
    opened, closed = make_grant(), make_grant(mode=GrantMode.CLOSED)
    for pulse in (PulseHead(), busy()):
        found = [work_budget_s(whole(g), [whole(pulse)], now_ns=NOW_NS) for g in (opened, closed)]
        assert found[0] == found[1]


def test_where_a_step_is_preempted_work_is_too(make_grant: MakeGrant, whole: Whole) -> None:
    alone = work_budget_s(whole(make_grant()), [whole(busy())], now_ns=NOW_NS)
    grant = make_grant(blocking_ratio=0.02)
    preempted = work_budget_s(whole(grant), [whole(busy())], now_ns=NOW_NS)
    assert preempted > 10 * alone > 0


@pytest.mark.parametrize("fault", list(PageFault))
def test_a_missing_page_leaves_no_budget(
    make_grant: MakeGrant, whole: Whole, fault: PageFault
) -> None:
    missing: Reading[Any] = Reading(None, fault)
    assert work_budget_s(missing, [whole(PulseHead())], now_ns=NOW_NS) == -math.inf
    assert work_budget_s(whole(make_grant()), [missing], now_ns=NOW_NS) == -math.inf
    assert work_budget_s(whole(make_grant()), [], now_ns=NOW_NS) == -math.inf
    two = make_grant(pulses=("pulse.prod.0", "pulse.prod.1"))
    assert work_budget_s(whole(two), [whole(PulseHead()), missing], now_ns=NOW_NS) == -math.inf


def test_beside_an_engine_that_hangs_nothing_is_known(make_grant: MakeGrant, whole: Whole) -> None:
    hanging = busy(last_step_end_ns=NOW_NS - 60_000_000_000)
    assert work_budget_s(whole(make_grant()), [whole(hanging)], now_ns=NOW_NS) == -math.inf


def test_an_experiment_without_a_gate_has_none_here(make_grant: MakeGrant, whole: Whole) -> None:
    assert work_budget_s(whole(make_grant(mode=GrantMode.UNGATED)), [], now_ns=NOW_NS) == math.inf


def test_pieces_that_fit_follow_each_other_without_a_pause() -> None:
    pace = WorkPace(piece_s=0.01)
    assert all(pace.admits(0.01, now=0.0) for _ in range(100))


@pytest.mark.parametrize("piece_s", [0.002, 0.5])
def test_without_any_slack_pieces_take_the_small_share_of_the_time(piece_s: float) -> None:
    pace, now, worked_s = WorkPace(piece_s=piece_s), 0.0, 0.0
    while now < 400 * piece_s:
        if pace.admits(-math.inf, now=now):
            worked_s += piece_s
            now += piece_s
            pace.observe(piece_s)
        now += piece_s / 10
    assert 0.6 * SHARE < worked_s / now <= SHARE + 1e-9


def test_nothing_is_stuck_for_longer_than_the_share_says() -> None:
    pace = WorkPace(piece_s=0.01)
    assert not pace.admits(-math.inf, now=5.0)
    assert not pace.admits(-math.inf, now=5.19)
    assert pace.admits(-math.inf, now=5.2)
    assert not pace.admits(-math.inf, now=5.2)


def test_a_longer_piece_is_expected_at_once_and_a_shorter_one_slowly() -> None:
    pace = WorkPace(piece_s=0.01)
    pace.observe(0.1)
    assert pace.piece_s == 0.1
    pace.observe(0.0)
    assert pace.piece_s == pytest.approx(0.08)


def test_one_long_piece_makes_the_next_one_wait_for_its_own_share_alone() -> None:
    pace = WorkPace(piece_s=0.01)
    assert not pace.admits(-math.inf, now=0.0)
    assert pace.admits(-math.inf, now=1.0)
    pace.observe(1.0)
    assert not pace.admits(-math.inf, now=20.9)
    assert pace.admits(-math.inf, now=21.0)
    pace.observe(0.01)
    assert pace.piece_s > 0.5, "what fits is judged with care"
    assert not pace.admits(0.5, now=21.1)
    assert pace.admits(-math.inf, now=21.2), "and what waits waits for the share of the last"


def test_a_shorter_piece_is_believed_after_some() -> None:
    pace = WorkPace(piece_s=0.1)
    for _ in range(50):
        pace.observe(0.01)
    assert pace.piece_s == pytest.approx(0.01, rel=0.01)
