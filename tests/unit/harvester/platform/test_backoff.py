"""Calls are repeated while they progress, with growing pauses, and not for ever."""

from contextlib import suppress
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import Exhausted
from harvester.platform.backoff import Backoff, Interrupted, RetryLimits, retry_after_s
from tests.virtual_clock import VirtualClock

LIMITS = RetryLimits(give_up_s=10.0, attempts_max=5, first_wait_s=1.0, wait_max_s=3.0)


def _backoff(clock: VirtualClock, limits: RetryLimits = LIMITS) -> Backoff:
    return Backoff(
        limits,
        clock,
        random=Random(0),
        sleep=lambda wait_s: clock.advance_to(clock.now() + wait_s),
    )


def test_waits_double_up_to_the_longest_with_jitter() -> None:
    backoff = _backoff(VirtualClock(), RetryLimits(give_up_s=1e9, first_wait_s=1.0, wait_max_s=3.0))
    waits = [backoff.wait_s() for _ in range(6)]
    for wait, own in zip(waits, [1.0, 2.0, 3.0, 3.0, 3.0, 3.0], strict=True):
        assert wait is not None
        assert 0.5 * own <= wait <= 1.5 * own
    assert len(set(waits)) == 6


def test_callers_with_other_seeds_do_not_come_back_together() -> None:
    waits = {
        Backoff(LIMITS, VirtualClock(), random=Random(f"turn-{i}")).wait_s() for i in range(50)
    }
    assert len(waits) == 50


def test_a_server_that_asks_for_a_longer_pause_gets_it() -> None:
    wait = _backoff(VirtualClock()).wait_s(retry_after_s=7.0)
    assert wait is not None
    assert 7.0 <= wait < 8.0


@pytest.mark.parametrize(
    ("header", "asked_s"),
    [(None, 0.0), ("", 0.0), ("1.5", 1.5), ("99", 60.0), ("-1", 0.0), ("nan", 0.0), ("soon", 0.0)],
)
def test_retry_after_is_read_as_bounded_seconds(header: str | None, asked_s: float) -> None:
    assert retry_after_s(header, most_s=60.0) == asked_s


def test_attempts_without_progress_end() -> None:
    backoff = _backoff(VirtualClock())
    given_up = [backoff.wait_s() is None for _ in range(5)]
    assert given_up == [False, False, False, False, True]


def test_attempts_may_be_bounded_by_time_alone() -> None:
    backoff = _backoff(VirtualClock(), RetryLimits(give_up_s=1e9, attempts_max=inf))
    assert all(backoff.wait_s() is not None for _ in range(1000))


def test_time_without_progress_ends() -> None:
    clock = VirtualClock(100.0)
    backoff = _backoff(clock)
    clock.advance_to(109.9)
    assert not backoff.is_over
    assert backoff.wait_s() is None
    backoff.check("reading")
    clock.advance_to(110.0)
    assert backoff.is_over
    with pytest.raises(Exhausted, match="reading; gave up after 10 s, try again later"):
        backoff.check("reading")


def test_progress_begins_everything_anew() -> None:
    clock = VirtualClock()
    backoff = _backoff(clock)
    for step in range(1, 20):
        clock.advance_to(8.0 * step)
        assert backoff.wait_s() is not None
        backoff.received(step * LIMITS.progress_bytes)
    clock.advance_to(8.0 * 19 + 9.9)
    assert not backoff.is_over


def test_crawling_is_no_progress() -> None:
    clock = VirtualClock()
    backoff = _backoff(clock)
    for step in range(10):
        clock.advance_to(float(step))
        backoff.received(step * 100)
    clock.advance_to(10.0)
    assert backoff.is_over


@given(st.lists(st.floats(0, 5), max_size=20), st.integers(0, 30))
def test_persisting_ends_in_bounded_time(asked: list[float], good_at: int) -> None:
    clock = VirtualClock()
    attempts = 0

    def attempt() -> str:
        nonlocal attempts
        attempts += 1
        if attempts > good_at:
            return "read"
        raise Interrupted("cut", retry_after_s=asked[attempts % len(asked)] if asked else 0.0)

    with suppress(Exhausted):
        _backoff(clock).persist(attempt)
        assert attempts == good_at + 1
    assert clock.now() < LIMITS.give_up_s
    assert attempts <= LIMITS.attempts_max


def test_an_error_that_is_no_interruption_ends_at_once() -> None:
    clock = VirtualClock()

    def attempt() -> None:
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError):
        _backoff(clock).persist(attempt)
    assert clock.now() == 0.0
