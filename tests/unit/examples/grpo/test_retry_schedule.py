from random import Random

from hypothesis import given
from hypothesis import strategies as st

from examples.grpo.retry_schedule import RetrySchedule


@given(st.integers(1, 59), st.one_of(st.none(), st.floats(-10, 1e9)), st.integers())
def test_every_wait_is_positive_and_bounded(
    attempt: int, retry_after_s: float | None, seed: int
) -> None:
    schedule = RetrySchedule()
    wait_s = schedule.wait_s(attempt, retry_after_s=retry_after_s, random=Random(seed))
    assert wait_s is not None
    assert 0 < wait_s <= schedule.wait_max_s


def test_it_gives_up_after_the_last_attempt() -> None:
    schedule = RetrySchedule(attempts_max=3)
    waits = [schedule.wait_s(attempt, random=Random(1)) for attempt in (1, 2, 3)]
    assert [wait is None for wait in waits] == [False, False, True]


def test_it_waits_longer_where_the_gateway_asks_for_it() -> None:
    schedule = RetrySchedule()
    plain = schedule.wait_s(1, random=Random(1))
    asked = schedule.wait_s(1, retry_after_s=0.8, random=Random(1))
    assert plain is not None
    assert asked is not None
    assert asked == 16 * plain


def test_callers_with_other_names_do_not_come_back_together() -> None:
    schedule = RetrySchedule()
    waits = {schedule.wait_s(3, random=Random(f"turn-{i}")) for i in range(50)}
    assert len(waits) == 50
