"""The kill file as an operator, or an accident, leaves it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harvester.agent import operator_files
from harvester.agent.operator_files import LastRead, read_kill_switch
from harvester.agent.stop_orders import read_stop_file
from harvester.contracts.wire.stops import Stop, StopOrder
from harvester.policy.sample import KillSwitch


@pytest.fixture
def kill(tmp_path: Path) -> Path:
    return tmp_path / "kill"


@pytest.mark.parametrize(
    ("text", "switch", "unclear"),
    [
        ("hold", KillSwitch.HOLD, ""),
        (" hold\n", KillSwitch.HOLD, ""),
        ("drain", KillSwitch.DRAIN, ""),
        ("", KillSwitch.DRAIN, "is empty"),
        ("HOLD", KillSwitch.DRAIN, "has 'HOLD'"),
        ("hold \x1b[2Jall\n", KillSwitch.DRAIN, "has 'hold [2Jall'"),
        ("\x00", KillSwitch.DRAIN, "has no readable word"),
    ],
)
def test_anything_but_hold_drains_and_is_named_with_the_known_words(
    kill: Path, text: str, switch: KillSwitch, unclear: str
) -> None:
    kill.write_text(text)
    os.utime(kill, (0, 0))
    last = LastRead[KillSwitch]()
    assert read_kill_switch(kill, last) is switch
    assert last.unclear == (unclear and f"{kill} {unclear}: known are hold, drain")
    kill.unlink()
    assert (read_kill_switch(kill, last), last.unclear) == (KillSwitch.NONE, "")


def test_a_file_that_was_opened_and_not_yet_written_drains_only_where_it_stays_empty(
    kill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    age_s = 0.05
    monkeypatch.setattr(operator_files, "wall_seconds", lambda: kill.stat().st_mtime + age_s)
    for _ in range(2):
        with kill.open("w") as file:
            assert read_kill_switch(kill, LastRead()) is KillSwitch.HOLD, (
                "as `echo hold >` leaves it at first"
            )
            file.write("hold")
        assert read_kill_switch(kill, LastRead()) is KillSwitch.HOLD
    kill.write_text("")
    age_s = 0.15
    assert read_kill_switch(kill, LastRead()) is KillSwitch.DRAIN


def test_no_file_is_no_switch(kill: Path) -> None:
    assert read_kill_switch(kill, LastRead()) is KillSwitch.NONE


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_drains_and_holds_no_beat_up(
    kill: Path, make: Callable[[Path], None]
) -> None:
    make(kill)
    last = LastRead[KillSwitch]()
    assert read_kill_switch(kill, last) is KillSwitch.DRAIN
    assert last.unclear.startswith(f"{kill} ")


def test_a_link_to_nowhere_drains(kill: Path) -> None:
    kill.symlink_to("/nonexistent/kill")
    last = LastRead[KillSwitch]()
    assert read_kill_switch(kill, last) is KillSwitch.DRAIN
    assert last.unclear == f"{kill} is a link to a file that is not there"


def exhaust(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(operator_files.os, "open", fail)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_a_descriptor_the_same_file_means_what_it_meant(
    kill: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    last, last_stop = LastRead[KillSwitch](), LastRead[Stop | None]()
    exhaust(monkeypatch, number)
    assert read_kill_switch(kill, last) is KillSwitch.NONE
    assert read_stop_file(kill, last_stop) is None
    monkeypatch.undo()
    kill.write_text("hold")
    stop = read_stop_file(kill, last_stop)
    assert read_kill_switch(kill, last) is KillSwitch.HOLD
    exhaust(monkeypatch, number)
    assert (read_kill_switch(kill, last), last.fault) == (KillSwitch.HOLD, "")
    assert read_stop_file(kill, last_stop) == stop
    kill.write_text("drain")
    assert read_kill_switch(kill, last) is KillSwitch.DRAIN
    assert "kill cannot be read by the agent" in last.fault
    assert last.unclear == ""
    changed = read_stop_file(kill, last_stop)
    assert changed is not None
    assert (changed.order, changed.by) == (StopOrder.DRAIN, "the agent")
    monkeypatch.undo()
    assert (read_kill_switch(kill, last), last.fault) == (KillSwitch.DRAIN, "")
