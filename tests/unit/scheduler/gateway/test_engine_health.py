"""Broken attempts and foreign changes of the weights of one engine."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.gateway.policy.engine_health import (
    FORGOTTEN_S,
    MOST_IN_A_ROW,
    EngineLog,
    FaultStreak,
    ForeignUpdates,
)


def test_one_broken_attempt_is_not_the_engines_fault() -> None:
    assert not FaultStreak().fail(began_s=0.0, now=1.0)


def test_several_in_a_row_are() -> None:
    streak = FaultStreak()
    verdicts = [streak.fail(began_s=float(at), now=at + 0.5) for at in range(MOST_IN_A_ROW)]
    assert verdicts == [False] * (MOST_IN_A_ROW - 1) + [True]


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=200))
def test_attempts_that_ran_side_by_side_count_once(began) -> None:
    streak = FaultStreak()
    assert not any(streak.fail(began_s=at_s, now=1.5) for at_s in began)


def test_an_attempt_that_comes_to_its_end_ends_the_row() -> None:
    streak = FaultStreak()
    for at in range(10 * MOST_IN_A_ROW):
        assert not streak.fail(began_s=float(at), now=at + 0.5)
        if at % (MOST_IN_A_ROW - 1) == MOST_IN_A_ROW - 2:
            streak.succeed()


def test_once_costs_no_wait_and_again_costs_ever_more() -> None:
    changes = ForeignUpdates()
    assert changes.seen(now=0)
    assert changes.until_s <= 0
    waits = []
    for _ in range(9):
        assert not changes.seen(now=10), "reported once"
        waits.append(changes.until_s - 10)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_foreign_change_after_the_memory_s_end_is_reported_again() -> None:
    changes = ForeignUpdates()
    changes.seen(now=0)
    changes.seen(now=1)
    assert changes.seen(now=2 + FORGOTTEN_S)
    assert changes.until_s <= 2 + FORGOTTEN_S


def test_the_log_has_each_join_loss_and_return_at_once() -> None:
    log = EngineLog()
    assert log.line(up=False, losses=0, now=0.0) == ""
    assert log.line(up=True, losses=0, now=1.0) == "is up"
    log.fault = "no answer"
    assert log.line(up=False, losses=1, now=2.0) == "is lost: no answer"
    assert log.line(up=True, losses=1, now=3.0) == "is back"
    assert log.line(up=True, losses=1, now=4.0) == ""


def test_an_engine_that_flaps_has_few_lines_and_its_last_state_in_the_end() -> None:
    log = EngineLog(fault="no answer")
    lines = [log.line(up=at % 2 == 0, losses=(at + 1) // 2, now=float(at)) for at in range(601)]
    assert 6 <= sum(map(bool, lines)) <= 6 + 10
    later = [log.line(up=True, losses=300, now=601.0 + at) for at in range(120)]
    (last,) = filter(None, [lines[-1], *later])
    assert last.startswith("is back, ")
    assert last.endswith("losses since the last line: no answer")
