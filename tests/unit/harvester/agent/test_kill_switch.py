"""The kill file as an operator, or an accident, leaves it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harvester.agent import operator_files
from harvester.agent.operator_files import read_kill_switch
from harvester.policy.sample import KillSwitch


@pytest.fixture
def kill(tmp_path: Path) -> Path:
    return tmp_path / "kill"


@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ("hold", KillSwitch.HOLD),
        (" hold\n", KillSwitch.HOLD),
        ("drain", KillSwitch.DRAIN),
        ("", KillSwitch.DRAIN),
        ("HOLD", KillSwitch.DRAIN),
        ("hold everything", KillSwitch.DRAIN),
    ],
)
def test_anything_but_hold_drains(kill: Path, text: str, switch: KillSwitch) -> None:
    kill.write_text(text)
    os.utime(kill, (0, 0))
    assert read_kill_switch(kill) is switch


def test_a_file_that_was_opened_and_not_yet_written_drains_only_where_it_stays_empty(
    kill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    age_s = 0.05
    monkeypatch.setattr(operator_files, "wall_seconds", lambda: kill.stat().st_mtime + age_s)
    for _ in range(2):
        with kill.open("w") as file:
            assert read_kill_switch(kill) is KillSwitch.HOLD, "as `echo hold >` leaves it at first"
            file.write("hold")
        assert read_kill_switch(kill) is KillSwitch.HOLD
    kill.write_text("")
    age_s = 0.15
    assert read_kill_switch(kill) is KillSwitch.DRAIN


def test_no_file_is_no_switch(kill: Path) -> None:
    assert read_kill_switch(kill) is KillSwitch.NONE


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_drains_and_holds_no_beat_up(
    kill: Path, make: Callable[[Path], None]
) -> None:
    make(kill)
    assert read_kill_switch(kill) is KillSwitch.DRAIN


def test_a_link_to_nowhere_drains(kill: Path) -> None:
    kill.symlink_to("/nonexistent/kill")
    assert read_kill_switch(kill) is KillSwitch.DRAIN
