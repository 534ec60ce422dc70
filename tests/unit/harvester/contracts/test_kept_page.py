"""A page that outlives what happens to its files, and two processes that both want it."""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.page import PAGE_BYTES, KeptPage, PageFault, PageReader, PageWriter, Pulse

NOW_NS = 1_000_000_000_000
BUSY = Pulse(in_flight=41)
IDLE = Pulse(in_flight=0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pulse.production.0"


@pytest.fixture
def page(path: Path) -> Iterator[KeptPage[Pulse]]:
    page = KeptPage(path, Pulse)
    yield page
    page.close()


@pytest.fixture
def rival(path: Path) -> Iterator[KeptPage[Pulse]]:
    page = KeptPage(path, Pulse)
    yield page
    page.close()


def beat(page: KeptPage[Pulse], pulse: Pulse) -> None:
    page.keep()
    page.write(pulse, now_ns=NOW_NS, ttl_ns=1)


def seen(path: Path) -> Pulse | PageFault | None:
    reading = PageReader(path, Pulse).read(now_ns=NOW_NS)
    return reading.record or reading.fault


def fault_at(path: Path, now_ns: int) -> PageFault | None:
    return PageReader(path, Pulse).read(now_ns=now_ns).fault


def lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def test_two_engines_of_one_name_are_both_rejected(
    path: Path, page: KeptPage[Pulse], rival: KeptPage[Pulse], caplog: pytest.LogCaptureFixture
) -> None:
    beat(page, BUSY)
    beat(rival, IDLE)
    assert seen(path) == BUSY, "the second writes nothing over the first"
    beat(page, BUSY)
    for _ in range(3):
        assert seen(path) is PageFault.CONFLICT
        beat(rival, IDLE)
        beat(page, BUSY)
    logged = [record.getMessage() for record in caplog.records]
    refusals = [line for line in logged if f"process {os.getpid()} " in line]
    assert len(refusals) == 1
    assert len([line for line in logged if "ROSEMUX_ENGINE" in line]) == 1


def test_once_the_second_engine_is_gone_the_first_is_believed_again(
    path: Path, page: KeptPage[Pulse], rival: KeptPage[Pulse]
) -> None:
    beat(page, BUSY)
    beat(rival, IDLE)
    beat(page, BUSY)
    rival.close()
    beat(page, BUSY)
    assert seen(path) == BUSY


def test_once_the_first_engine_is_gone_the_second_has_the_page(
    path: Path, page: KeptPage[Pulse], rival: KeptPage[Pulse]
) -> None:
    beat(page, BUSY)
    beat(rival, IDLE)
    beat(page, BUSY)
    page.close()
    beat(rival, IDLE)
    assert seen(path) == IDLE


def test_a_third_engine_of_the_name_keeps_the_page_unbelieved(
    path: Path, page: KeptPage[Pulse], rival: KeptPage[Pulse]
) -> None:
    third = KeptPage(path, Pulse)
    for each in (page, rival, third):
        beat(each, IDLE)
    beat(page, IDLE)
    rival.close()
    beat(page, IDLE)
    assert seen(path) is PageFault.CONFLICT
    third.close()


@pytest.mark.parametrize("lost", ["page", "lock", "both"])
def test_a_second_engine_is_found_out_though_files_were_deleted(
    path: Path, page: KeptPage[Pulse], rival: KeptPage[Pulse], lost: str
) -> None:
    beat(page, BUSY)
    if lost != "lock":
        path.unlink()
    if lost != "page":
        lock_of(path).unlink()
    beat(rival, IDLE)
    beat(page, BUSY)
    beat(rival, IDLE)
    beat(page, BUSY)
    assert seen(path) is PageFault.CONFLICT


def test_two_ended_engines_leave_no_conflict(
    path: Path, page: KeptPage[Pulse], rival: KeptPage[Pulse]
) -> None:
    beat(page, BUSY)
    beat(rival, IDLE)
    for later_ns in range(3):
        page.keep()
        page.write(BUSY, now_ns=NOW_NS + later_ns, ttl_ns=1)
        assert fault_at(path, NOW_NS + later_ns) is PageFault.CONFLICT, "as long as they live"
    rival.close()
    page.close()
    assert fault_at(path, NOW_NS + 3) is PageFault.EXPIRED


@pytest.mark.parametrize("left", [False, True], ids=["a new page", "one taken over"])
def test_a_writer_that_ended_before_its_first_record_leaves_nothing_to_wait_for(
    path: Path, page: KeptPage[Pulse], left: bool
) -> None:
    if left:
        beat(page, BUSY)
    page.close()
    PageWriter(path, Pulse).close()
    assert fault_at(path, NOW_NS + 1) is PageFault.EXPIRED


def test_a_page_that_was_deleted_is_made_again(path: Path, page: KeptPage[Pulse]) -> None:
    beat(page, IDLE)
    path.unlink()
    beat(page, BUSY)
    assert seen(path) == BUSY


def test_a_page_that_was_replaced_is_made_again(
    path: Path, page: KeptPage[Pulse], tmp_path: Path
) -> None:
    beat(page, IDLE)
    (tmp_path / "other").write_bytes(path.read_bytes())
    (tmp_path / "other").rename(path)
    beat(page, BUSY)
    assert seen(path) == BUSY


@pytest.mark.parametrize("size_bytes", [0, 3, 12, 100])
def test_a_page_that_was_cut_short_is_torn_and_then_whole_again(
    path: Path, page: KeptPage[Pulse], size_bytes: int
) -> None:
    beat(page, IDLE)
    reader = PageReader(path, Pulse)
    assert reader.read(now_ns=NOW_NS).fault is None
    os.truncate(path, size_bytes)
    assert seen(path) is PageFault.TORN
    assert reader.peek() is None or size_bytes >= 12
    beat(page, BUSY)
    assert reader.read(now_ns=NOW_NS).record == BUSY
    assert path.stat().st_size == PAGE_BYTES


def test_without_room_there_is_no_page_until_there_is_room(
    path: Path,
    page: KeptPage[Pulse],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    caplog.set_level(logging.WARNING)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        for _ in range(3):
            beat(page, BUSY)
        with pytest.raises(Exhausted, match="no room"):
            page.make()
    assert seen(path) is PageFault.TORN, "an engine without a pulse is no idle engine"
    assert ["No space left" in record.getMessage() for record in caplog.records] == [True]
    beat(page, BUSY)
    assert seen(path) == BUSY
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        page.write(IDLE, now_ns=NOW_NS, ttl_ns=1)
    beat(page, IDLE)
    assert seen(path) == IDLE


def test_a_child_made_by_fork_neither_holds_the_page_nor_writes_it(path: Path) -> None:
    writer = PageWriter(path, Pulse)
    writer.write(BUSY, now_ns=NOW_NS, ttl_ns=1)
    told, tell = os.pipe()
    release, ended = os.pipe()
    child = os.fork()
    if child == 0:
        writer.write(IDLE, now_ns=NOW_NS, ttl_ns=1)
        os.write(tell, b"1")
        os.close(ended)
        os.read(release, 1)
        os._exit(0)
    os.read(told, 1)
    try:
        assert seen(path) == BUSY
        writer.close()
        successor = PageWriter(path, Pulse)
        successor.close()
    finally:
        for pipe in (ended, release, told, tell):
            os.close(pipe)
        os.waitpid(child, 0)


@pytest.mark.parametrize("trap", ["link", "second name", "folder"])
def test_a_foreign_file_in_the_place_of_a_lock_is_neither_followed_nor_changed(
    path: Path, tmp_path: Path, trap: str
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    mine.chmod(0o644)
    match trap:
        case "link":
            lock_of(path).symlink_to(mine)
        case "second name":
            lock_of(path).hardlink_to(mine)
        case _:
            lock_of(path).mkdir()
    with pytest.raises(ConfigError, match="lock"):
        PageWriter(path, Pulse)
    assert mine.read_text() == "precious"
    assert mine.stat().st_mode & 0o777 == 0o644


def test_only_the_writers_user_may_open_its_lock_whatever_the_umask(path: Path) -> None:
    before = os.umask(0)
    try:
        writer = PageWriter(path, Pulse)
    finally:
        os.umask(before)
    assert lock_of(path).stat().st_mode & 0o777 == 0o600
    writer.close()


def test_a_page_with_a_second_name_is_not_written(path: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    path.hardlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="one name"):
        PageWriter(path, Pulse)
    assert (tmp_path / "mine").read_text() == "precious"
