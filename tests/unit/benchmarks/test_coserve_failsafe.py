"""Kills and stops of the agent in several runs: what counts, what comes next, when it is enough."""

import signal
from pathlib import Path

import pytest

from benchmarks.coserve.failsafe import FailsafeTrial, TrialLog
from harvester.contracts.errors import ConfigError


def fill(log: TrialLog, *, ms: float | None = 500.0, most: int = 100) -> list[str]:
    """Signals in the order in which they were asked for."""
    signals: list[str] = []
    while (number := log.next()) is not None and len(signals) < most:
        log.add(FailsafeTrial(signal=number.name, ms=ms))
        signals.append(number.name)
    return signals


def test_kills_and_stops_take_turns_until_there_are_enough() -> None:
    log = TrialLog(3)
    assert fill(log) == ["SIGKILL", "SIGSTOP"] * 3
    assert log.figures()["n"] == {"SIGKILL": 3, "SIGSTOP": 3}


def test_a_run_goes_on_where_the_one_before_was_ended(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    fill(TrialLog(4, file), ms=505.0, most=3)
    log = TrialLog(4, file)
    assert log.next() is signal.SIGSTOP
    log.add(FailsafeTrial(signal="SIGSTOP", ms=512.0))
    assert len(fill(log)) == 4
    found = TrialLog(4, file).figures()
    assert found == {"kill_max": 505.0, "stop_max": 512.0, "n": {"SIGKILL": 4, "SIGSTOP": 4}}


def test_a_guest_that_stood_says_nothing_and_is_tried_again_but_not_for_ever() -> None:
    log = TrialLog(2)
    log.add(FailsafeTrial(signal="SIGKILL", ms=None))
    log.add(FailsafeTrial(signal="SIGKILL", ms=501.0))
    assert log.measured(signal.SIGKILL) == [501.0]
    assert len(fill(log, ms=None)) == 2 + 4
    assert log.figures() == {
        "kill_max": 501.0,
        "stop_max": None,
        "n": {"SIGKILL": 1, "SIGSTOP": 0},
    }


def test_a_file_of_something_else_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    file.write_text("requests,tokens\n")
    with pytest.raises(ConfigError, match="holds no trials"):
        TrialLog(1, file)
    file.write_text("")
    assert TrialLog(1, file).trials == []
