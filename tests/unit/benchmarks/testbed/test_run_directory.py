import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.testbed.run_directory import run_directory
from harvester.contracts.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def shared_directory() -> Iterator[Callable[[int], Path]]:
    """Makes what a run of the given process has in shared memory."""
    made: list[Path] = []

    def make(owner: int) -> Path:
        directory = SHARED_MEMORY / f"rosemux-demo-{owner}-left{os.getpid()}"
        directory.mkdir()
        made.append(directory)
        return directory

    yield make
    for directory in made:
        if directory.exists():
            directory.rmdir()


def test_only_results_weights_and_logs_stay(tmp_path: Path) -> None:
    out = tmp_path / "out" / "demo"
    with run_directory(out, cache=tmp_path / "cache") as paths:
        assert paths.run.parent == out
        assert paths.pages.parent == SHARED_MEMORY
        assert paths.cache.is_dir()
        (paths.run / "model").mkdir()
        (paths.weights / "job").mkdir(parents=True)
        (paths.pages / "slot").mkdir()
        paths.logs.mkdir()
        (paths.logs / "engine.log").write_text("said")
        (out / "result.json").write_text("{}")
    assert not paths.run.exists()
    assert not paths.pages.exists()
    assert {entry.name for entry in out.iterdir()} == {"logs", "result.json", "weights"}
    assert (out / "weights" / "job").is_dir()
    assert (paths.logs / "engine.log").read_text() == "said"


def test_a_failed_run_leaves_no_more(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        run_directory(tmp_path, cache=tmp_path / "cache") as paths,
    ):
        raise KeyboardInterrupt
    assert not paths.run.exists()
    assert not paths.pages.exists()


def test_logs_are_those_of_the_last_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "old.log").touch()
    with run_directory(tmp_path, cache=tmp_path / "cache") as paths:
        assert not (paths.logs / "old.log").exists()


def test_weights_are_those_of_the_last_run_that_had_any(tmp_path: Path) -> None:
    for job in ("first", "second", None):
        with run_directory(tmp_path, cache=tmp_path / "cache") as paths:
            if job is not None:
                (paths.weights / job).mkdir(parents=True)
    assert [entry.name for entry in (tmp_path / "weights").iterdir()] == ["second"]


def test_leftovers_of_a_killed_run_are_removed_at_the_next_start(
    tmp_path: Path, ended_pid: int, shared_directory: Callable[[int], Path]
) -> None:
    left = tmp_path / f"run-{ended_pid}-x"
    left.mkdir()
    (left / "weights").touch()
    shared = shared_directory(ended_pid)
    with run_directory(tmp_path, cache=tmp_path / "cache"):
        assert not left.exists()
        assert not shared.exists()


def test_files_of_a_living_run_and_foreign_files_are_left_alone(
    tmp_path: Path, shared_directory: Callable[[int], Path]
) -> None:
    beside = tmp_path / f"run-{os.getpid()}-x"
    stranger = tmp_path / "run-notes"
    for directory in (beside, stranger):
        directory.mkdir()
    shared = shared_directory(os.getpid())
    with run_directory(tmp_path, cache=tmp_path / "cache"):
        assert beside.exists()
        assert stranger.exists()
        assert shared.exists()


def test_a_place_that_cannot_be_written_is_the_users_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "out"
    with (
        pytest.raises(ConfigError, match="choose --out"),
        run_directory(place, cache=tmp_path / "cache"),
    ):
        pytest.fail("nothing runs there")
