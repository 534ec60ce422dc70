"""One preparation at a time runs in the background and is handed over once."""

import threading
from collections.abc import Iterator

import pytest

from weightsync.vllm.stager import Stager, StageState


class Work:
    """Waits until it is let go; counts how often it was done."""

    def __init__(self, result: str = "made") -> None:
        self.go = threading.Event()
        self.done = 0
        self.result = result

    def __call__(self) -> str:
        assert self.go.wait(10)
        self.done += 1
        return self.result


@pytest.fixture
def stager() -> Iterator[Stager[str]]:
    made: Stager[str] = Stager()
    yield made
    made.clear()


def failing() -> str:
    raise ValueError("no such version")


def settled(stager: Stager[str]) -> None:
    """Returns once the background thread has done all that it was given."""
    reached = threading.Event()
    stager.later(reached.set)
    assert reached.wait(10)


def test_begin_returns_at_once_and_a_second_call_reports_progress(
    stager: Stager[str],
) -> None:
    work = Work()
    assert stager.begin(1, work).state is StageState.RUNNING
    assert stager.begin(1, work).state is StageState.RUNNING
    work.go.set()
    settled(stager)
    assert stager.begin(1, work).state is StageState.READY
    assert work.done == 1


def test_a_prepared_version_is_taken_without_new_work(stager: Stager[str]) -> None:
    work = Work()
    stager.begin(1, work)
    work.go.set()
    assert stager.take(1, failing) == "made"
    assert work.done == 1


def test_a_result_is_handed_over_once(stager: Stager[str]) -> None:
    work = Work()
    work.go.set()
    stager.begin(1, work)
    stager.take(1, work)
    stager.take(1, work)
    assert work.done == 2


def test_an_unprepared_version_is_made_when_it_is_taken(stager: Stager[str]) -> None:
    assert stager.take(1, lambda: "made now") == "made now"


def test_the_newest_key_wins(stager: Stager[str]) -> None:
    old, new = Work("old"), Work("new")
    old.go.set()
    new.go.set()
    stager.begin(1, old)
    stager.begin(2, new)
    assert stager.take(2, failing) == "new"
    assert stager.take(1, lambda: "again") == "again"


def test_a_cleared_result_is_made_again(stager: Stager[str]) -> None:
    stager.begin(1, lambda: "old")
    stager.clear()
    assert stager.take(1, lambda: "new") == "new"


def test_a_failure_is_reported_once_and_then_retried(stager: Stager[str]) -> None:
    stager.begin(1, failing)
    settled(stager)
    told = stager.begin(1, failing)
    assert told.state is StageState.FAILED
    assert told.message == "ValueError: no such version"
    assert stager.begin(1, lambda: "made").state is StageState.RUNNING
    assert stager.take(1, failing) == "made"


def test_taking_after_a_failure_tries_once_more_and_raises_its_error(stager: Stager[str]) -> None:
    stager.begin(1, failing)
    assert stager.take(1, lambda: "made") == "made"
    with pytest.raises(ValueError, match="no such version"):
        stager.take(2, failing)
