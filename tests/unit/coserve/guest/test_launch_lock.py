"""Engines start on a GPU one after another, whichever way one of them ends."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coserve.guest.launch_lock import LaunchLock
from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError

BRIEF_S = 0.05
LONG_S = 60.0


def test_a_second_engine_waits_until_the_first_has_started(tmp_path: Path) -> None:
    first, second = LaunchLock(tmp_path, ["GPU-1"]), LaunchLock(tmp_path, ["GPU-1"])
    first.acquire(timeout_s=BRIEF_S)
    with pytest.raises(Exhausted, match=rf"process {os.getpid()} has been starting .* GPU-1"):
        second.acquire(timeout_s=BRIEF_S)
    waiting = threading.Thread(target=second.acquire, kwargs={"timeout_s": LONG_S})
    waiting.start()
    assert waiting.is_alive()
    first.release()
    waiting.join()
    second.release()
    second.release()
    first.acquire(timeout_s=BRIEF_S)
    first.release()


def test_engines_on_other_gpus_start_together(tmp_path: Path) -> None:
    one, other = LaunchLock(tmp_path, ["GPU-1"]), LaunchLock(tmp_path, ["GPU-2"])
    one.acquire(timeout_s=BRIEF_S)
    other.acquire(timeout_s=BRIEF_S)
    one.release()
    other.release()


def test_an_engine_without_all_of_its_gpus_locks_none(tmp_path: Path) -> None:
    held, wide = LaunchLock(tmp_path, ["GPU-2"]), LaunchLock(tmp_path, ["GPU-2", "GPU-1"])
    held.acquire(timeout_s=BRIEF_S)
    with pytest.raises(Exhausted):
        wide.acquire(timeout_s=BRIEF_S)
    first = LaunchLock(tmp_path, ["GPU-1"])
    first.acquire(timeout_s=BRIEF_S)
    first.release()
    held.release()


def test_an_engine_that_is_killed_gives_its_turn_back(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, time\nfrom coserve.guest.launch_lock import LaunchLock\n"
        "lock = LaunchLock(pathlib.Path(sys.argv[1]), ['GPU-1'])\n"
        "lock.acquire(timeout_s=5)\nprint('started', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
    ) as starting:
        assert starting.stdout is not None
        assert starting.stdout.readline() == b"started\n"
        mine = LaunchLock(tmp_path, ["GPU-1"])
        with pytest.raises(Exhausted, match=str(starting.pid)):
            mine.acquire(timeout_s=BRIEF_S)
        starting.kill()
        mine.acquire(timeout_s=LONG_S)
        mine.release()


def test_a_child_that_inherits_the_file_does_not_keep_the_turn(tmp_path: Path) -> None:
    lock = LaunchLock(tmp_path, ["GPU-1"])
    lock.acquire(timeout_s=BRIEF_S)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        lock.release()
        other = LaunchLock(tmp_path, ["GPU-1"])
        other.acquire(timeout_s=BRIEF_S)
        other.release()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_where_no_lock_can_be_the_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent/GPU-1\.launch"):
        LaunchLock(tmp_path / "absent", ["GPU-1"]).acquire(timeout_s=BRIEF_S)
    with pytest.raises(PeerProtocolError):
        LaunchLock(tmp_path, ["../GPU-1"])
    (tmp_path / "elsewhere").touch()
    (tmp_path / "GPU-3.launch").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        LaunchLock(tmp_path, ["GPU-3"]).acquire(timeout_s=BRIEF_S)
