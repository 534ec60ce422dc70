"""Kills and stops of the agent in several runs: what counts, what comes next, when it is enough."""

import signal
from pathlib import Path

import pytest

from benchmarks.coserve.failsafe import Trial, TrialBook
from harvester.contracts.errors import ConfigError


def fill(book: TrialBook, *, ms: float | None = 500.0, most: int = 100) -> list[str]:
    """Signals in the order in which they were asked for."""
    asked: list[str] = []
    while (number := book.next()) is not None and len(asked) < most:
        book.add(Trial(signal=number.name, ms=ms))
        asked.append(number.name)
    return asked


def test_kills_and_stops_take_turns_until_there_are_enough() -> None:
    book = TrialBook(3)
    assert fill(book) == ["SIGKILL", "SIGSTOP"] * 3
    assert book.figures()["n"] == {"SIGKILL": 3, "SIGSTOP": 3}


def test_a_run_goes_on_where_the_one_before_was_ended(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    fill(TrialBook(4, file), ms=505.0, most=3)
    book = TrialBook(4, file)
    assert book.next() is signal.SIGSTOP
    book.add(Trial(signal="SIGSTOP", ms=512.0))
    assert len(fill(book)) == 4
    found = TrialBook(4, file).figures()
    assert found == {"kill_max": 505.0, "stop_max": 512.0, "n": {"SIGKILL": 4, "SIGSTOP": 4}}


def test_a_guest_that_stood_says_nothing_and_is_tried_again_but_not_for_ever() -> None:
    book = TrialBook(2)
    book.add(Trial(signal="SIGKILL", ms=None))
    book.add(Trial(signal="SIGKILL", ms=501.0))
    assert book.measured(signal.SIGKILL) == [501.0]
    assert len(fill(book, ms=None)) == 2 + 4
    assert book.figures() == {
        "kill_max": 501.0,
        "stop_max": None,
        "n": {"SIGKILL": 1, "SIGSTOP": 0},
    }


def test_a_file_of_something_else_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    file.write_text("requests,tokens\n")
    with pytest.raises(ConfigError, match="holds no trials"):
        TrialBook(1, file)
    file.write_text("")
    assert TrialBook(1, file).trials == []
