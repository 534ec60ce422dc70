"""Reads are tried again while they get on, and not for ever."""

from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.clock import VirtualClock
from harvester.contracts.errors import Exhausted
from weightsync.transport.patience import Interrupted, Patience, RetryLimits, persist

LIMITS = RetryLimits(give_up_s=10.0, attempts_max=5, first_wait_s=1.0, wait_max_s=3.0)


def _patience(limits: RetryLimits = LIMITS, *, now: float = 0.0) -> Patience:
    return Patience(limits, now=now, random=Random(0))


def test_waits_double_up_to_the_longest_with_jitter() -> None:
    patience = _patience(RetryLimits(give_up_s=1e9, first_wait_s=1.0, wait_max_s=3.0))
    waits = [patience.wait_s(now=0.0) for _ in range(6)]
    for wait, own in zip(waits, [1.0, 2.0, 3.0, 3.0, 3.0, 3.0], strict=True):
        assert wait is not None
        assert 0.5 * own <= wait <= 1.5 * own
    assert len(set(waits)) == 6


def test_a_server_that_asks_for_more_gets_it() -> None:
    wait = _patience().wait_s(now=0.0, retry_after_s=7.0)
    assert wait is not None
    assert 7.0 <= wait < 8.0


def test_attempts_without_progress_end() -> None:
    patience = _patience()
    given_up = [patience.wait_s(now=0.0) is None for _ in range(5)]
    assert given_up == [False, False, False, False, True]


def test_time_without_progress_ends() -> None:
    patience = _patience(now=100.0)
    assert not patience.is_over(now=109.9)
    assert patience.is_over(now=110.0)
    assert patience.wait_s(now=109.9) is None


def test_progress_begins_everything_anew() -> None:
    patience = _patience()
    for step in range(1, 20):
        assert patience.wait_s(now=8.0 * step) is not None
        patience.received(step * LIMITS.progress_bytes, now=8.0 * step)
    assert not patience.is_over(now=8.0 * 19 + 9.9)


def test_crawling_is_no_progress() -> None:
    patience = _patience()
    for step in range(10):
        patience.received(step * 100, now=float(step))
    assert patience.is_over(now=10.0)


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
        persist(
            attempt,
            _patience(),
            clock=clock,
            sleep=lambda wait_s: clock.advance_to(clock.now() + wait_s),
        )
        assert attempts == good_at + 1
    assert clock.now() < LIMITS.give_up_s
    assert attempts <= LIMITS.attempts_max


def test_an_error_that_is_no_interruption_ends_at_once() -> None:
    def attempt() -> None:
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError):
        persist(attempt, _patience(), clock=VirtualClock(), sleep=lambda _: pytest.fail("slept"))
