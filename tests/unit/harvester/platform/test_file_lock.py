"""A lock has one holder, names it, and outlives the process that took it in its children."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError
from harvester.platform.file_lock import FileLock, locked


def test_a_lock_has_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = FileLock(path), FileLock(path)
    assert first.take()
    assert not second.take()
    with pytest.raises(ConfigError, match="in use"):
        locked(path, taken="in use")
    first.release()
    assert second.take()
    for lock in (first, second):
        lock.close()
    locked(path, taken="in use").close()


def test_a_lock_names_the_process_that_signed_it(tmp_path: Path) -> None:
    held, other = locked(tmp_path / "lock", taken=""), FileLock(tmp_path / "lock")
    assert other.holder() == "?"
    held.sign()
    assert other.holder() == str(os.getpid())
    held.close()
    other.close()


def test_an_inherited_descriptor_holds_the_lock(tmp_path: Path) -> None:
    held = FileLock(tmp_path / "lock")
    assert held.take()
    inherited = os.dup(held.descriptor)
    held.close()
    other = FileLock(tmp_path / "lock")
    assert not other.take()
    os.close(inherited)
    assert other.take()
    other.close()


def test_a_forked_worker_neither_holds_nor_frees_a_lock_of_its_parent(tmp_path: Path) -> None:
    held, other = locked(tmp_path / "lock", taken=""), FileLock(tmp_path / "lock")
    ends, end = os.pipe()
    if (worker := os.fork()) == 0:
        with suppress(BaseException):
            os.write(end, b"%d" % held.descriptor)
            held.close()
        os._exit(0)
    os.waitpid(worker, 0)
    assert os.read(ends, 8) == b"-1", "a worker that outlives its parent keeps no lock"
    assert not other.take(), "the parent still holds it"
    inherited = os.dup(held.descriptor)
    held.close()
    assert other.take(), "its end frees it, whichever process still has the descriptor"
    for descriptor in (inherited, ends, end):
        os.close(descriptor)
    other.close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        FileLock(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()
