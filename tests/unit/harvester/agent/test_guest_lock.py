"""The lock that admits one guest to a slot: when it is free, and which leftovers are removed."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harvester.agent.guest_lock import GuestLock
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import ConfigError, Exhausted, Unsupported
from harvester.contracts.page import Guest, PageDirectory
from harvester.contracts.process import ProcessId, process_ids
from harvester.platform.kv_segment import KvSegment

MakeLock = Callable[[], GuestLock]


@pytest.fixture
def pages(tmp_path: Path) -> PageDirectory:
    return PageDirectory.create(tmp_path / "pages")


@pytest.fixture
def lock(pages: PageDirectory) -> Iterator[MakeLock]:
    made: list[GuestLock] = []

    def make() -> GuestLock:
        made.append(GuestLock(pages))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    yield sleeper
    sleeper.kill()
    sleeper.wait()


def leave_page(pages: PageDirectory, *processes: ProcessId) -> None:
    """Leave a page as a killed guest does: unclosed."""
    writer = pages.guest_writer()
    writer.write(Guest(processes=processes), now_ns=monotonic_ns(), ttl_ns=1)
    writer.close()


def test_two_guests_never_share_a_slot(lock: MakeLock) -> None:
    lock().take(timeout_s=0.0)
    with pytest.raises(Exhausted, match=f"started by process {os.getpid()}"):
        lock().take(timeout_s=0.0)


def test_an_engine_keeps_the_lock_of_a_command_that_was_killed(
    pages: PageDirectory, lock: MakeLock
) -> None:
    command = GuestLock(pages)
    command.take(timeout_s=0.0)
    engine = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"], pass_fds=[command.descriptor]
    )
    try:
        command.close()
        with pytest.raises(Exhausted):
            lock().take(timeout_s=0.0)
    finally:
        engine.kill()
        engine.wait()
    lock().take(timeout_s=0.0)


def test_a_worker_that_outlives_its_engine_keeps_it_too(
    pages: PageDirectory, lock: MakeLock, process: "subprocess.Popen[bytes]"
) -> None:
    leave_page(pages, *process_ids([process.pid]))
    with pytest.raises(Exhausted, match=f"process {process.pid} of a guest"):
        lock().take(timeout_s=0.0)
    process.kill()
    process.wait()
    lock().take(timeout_s=0.0)


def test_a_process_that_only_bears_a_dead_one_s_number_keeps_nothing(
    pages: PageDirectory, lock: MakeLock
) -> None:
    leave_page(pages, ProcessId(pid=os.getpid(), start_ticks=1))
    lock().take(timeout_s=0.0)


def test_a_killed_guest_s_shared_kv_is_removed(lock: MakeLock, tmp_path: Path) -> None:
    segment = KvSegment("guest_kv", owners=frozenset((os.getuid(),)), directory=tmp_path)
    other = KvSegment("prod_kv", directory=tmp_path)
    for one in (segment, other):
        one.path.write_bytes(bytes(24))
    free = lock()
    free.take(timeout_s=0.0)
    free.clear(segment)
    free.clear(segment)
    assert not segment.path.exists()
    assert other.path.exists()


def test_a_foreign_file_in_the_place_of_a_segment_is_left(lock: MakeLock, tmp_path: Path) -> None:
    free = lock()
    stranger = KvSegment("theirs", owners=frozenset((os.getuid() + 1,)), directory=tmp_path)
    longer = KvSegment("longer", owners=frozenset((os.getuid(),)), directory=tmp_path)
    stranger.path.write_bytes(bytes(24))
    longer.path.write_bytes(bytes(25))
    for one in (stranger, longer):
        with pytest.raises(Unsupported):
            free.clear(one)
        assert one.path.exists()


def test_a_slot_without_pages_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        GuestLock(PageDirectory(tmp_path / "nowhere"))
