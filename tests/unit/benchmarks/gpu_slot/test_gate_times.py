"""Times of obedience from logs with known answers."""

import pytest

from benchmarks.gpu_slot.engines.step_log import LoggedStep, ServedRequest
from benchmarks.gpu_slot.sharing.gate_times import (
    arrival_to_silence_s,
    closing_to_silence_s,
    grant_to_step_s,
    launched_after_arrival,
    summary_ms,
)

_MS = 1_000_000


def _step(start_ms: int, end_ms: int) -> LoggedStep:
    return LoggedStep(kind="decode", size=1, start_ns=start_ms * _MS, end_ns=end_ms * _MS)


def _request(arrival_ms: int, first_ms: int) -> ServedRequest:
    return ServedRequest(
        arrival_ns=arrival_ms * _MS, first_ns=first_ms * _MS, end_ns=first_ms * _MS, prompt_tokens=1
    )


GUEST = (_step(12, 20), _step(20, 30), _step(61, 70))


def test_an_opening_is_answered_by_the_first_launch_after_it() -> None:
    assert grant_to_step_s([10 * _MS, 60 * _MS], GUEST) == pytest.approx([0.002, 0.001])


def test_an_opening_that_no_step_followed_has_no_time() -> None:
    assert grant_to_step_s([80 * _MS], GUEST) == []


def test_a_closing_waits_for_the_step_that_runs() -> None:
    assert closing_to_silence_s([25 * _MS], [60 * _MS], GUEST) == pytest.approx([0.005])


def test_a_step_launched_after_the_closing_counts_until_its_end() -> None:
    assert closing_to_silence_s([15 * _MS], [60 * _MS], GUEST) == pytest.approx([0.015])


def test_a_closing_in_silence_takes_no_time() -> None:
    assert closing_to_silence_s([40 * _MS], [60 * _MS], GUEST) == [0.0]


def test_an_arrival_waits_for_all_steps_launched_before_its_first_token() -> None:
    assert arrival_to_silence_s([_request(15, 40)], GUEST) == pytest.approx([0.015])
    assert arrival_to_silence_s([_request(15, 19)], GUEST) == pytest.approx([0.005])


def test_an_arrival_in_silence_is_left_out() -> None:
    assert arrival_to_silence_s([_request(40, 50)], GUEST) == []


def test_steps_launched_between_arrival_and_first_token_are_counted() -> None:
    assert launched_after_arrival([_request(15, 40), _request(40, 50)], GUEST) == 1


def test_no_samples_have_no_quantiles() -> None:
    assert summary_ms([]) == {"count": 0}
    assert summary_ms([0.001, 0.003])["p50"] == pytest.approx(2.0)
