"""The compressed journal: the same lines, in fewer bytes, whole after a kill at any byte."""

import os
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from harvester.contracts import journal_frames
from harvester.contracts.errors import Corrupt
from harvester.contracts.journal import (
    MAX_LINE_BYTES,
    Decided,
    JournalWriter,
    Opened,
    config_hash,
    read_journal,
    torn_bytes,
)
from harvester.contracts.journal_frames import is_packed, last_line_of
from tests.unit.harvester.contracts.conftest import SmallDisk


class Sample(msgspec.Struct, frozen=True):
    noise: str


class Close(msgspec.Struct, frozen=True, tag="close"):
    reason: str


def first_line() -> Opened:
    config = {"epsilon": 0.05}
    return Opened(actor="a", policy="p", config=config, config_hash=config_hash(config))


def decide(writer: JournalWriter, t_s: float) -> None:
    # A beat is much like the one before it, and has some new digits.
    noise = "the same in every beat " * 40 + str(zlib.crc32(str(t_s).encode()))
    writer.decided(now=t_s, sample=Sample(noise), effects=(Close("breach"),))


def times(path: Path) -> list[float]:
    return [line.t_s for line in read_journal(path) if isinstance(line, Decided)]


def journal(path: Path, beats: int, **settings: Any) -> None:
    writer = JournalWriter(path, packed=True, **settings)
    writer.opened(first_line())
    for beat in range(beats):
        decide(writer, float(beat))
    writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slot.journal"


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of three lines."""
    monkeypatch.setattr(journal_frames, "_FRAME_BYTES", 2500)


@pytest.fixture
def killed(path: Path, small_frames: None) -> bytes:
    """The file of a writer that was killed after ten beats, two lines into a frame."""
    writer = JournalWriter(path, packed=True)
    writer.opened(first_line())
    for beat in range(10):
        decide(writer, float(beat))
    left = path.read_bytes()
    writer.close()
    assert last_line_of(path).in_frame is False
    return left


def test_a_compressed_journal_gives_the_lines_of_a_plain_one(path: Path) -> None:
    plain = path.with_name("plain")
    journal(path, 20)
    writer = JournalWriter(plain)
    writer.opened(first_line())
    for beat in range(20):
        decide(writer, float(beat))
    writer.close()

    def lines(file: Path) -> list[Any]:
        first, *rest = read_journal(file)
        assert isinstance(first, Opened)
        return [msgspec.structs.replace(first, wall=""), *rest]

    assert lines(path) == lines(plain)
    assert is_packed(path.read_bytes())
    assert path.stat().st_size < plain.stat().st_size / 8


def test_each_line_is_in_the_file_before_the_next_decision(path: Path) -> None:
    writer = JournalWriter(path, packed=True)
    writer.opened(first_line())
    for beat in range(3):
        decide(writer, float(beat))
        assert times(path) == [float(each) for each in range(beat + 1)]
    writer.close()


def test_a_kill_at_any_byte_costs_the_torn_line_alone(path: Path, killed: bytes) -> None:
    found = set()
    for size in range(len(killed)):
        path.write_bytes(killed[:size])
        whole = times(path)
        assert whole == [float(beat) for beat in range(len(whole))]
        found.add(len(whole))
        restarted = JournalWriter(path, packed=True)
        restarted.opened(first_line())
        decide(restarted, 99.0)
        restarted.close()
        assert times(path) == [*whole, 99.0]
    assert found == set(range(10))


def test_zstd_reads_what_a_killed_writer_and_its_successor_left(path: Path, killed: bytes) -> None:
    path.write_bytes(killed[:-3])
    journal(path, 2)
    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        lines = reader.read().splitlines()
    assert [msgspec.json.decode(line)["type"] for line in lines] == [
        "opened",
        *["decided"] * 9,
        "opened",
        *["decided"] * 2,
    ]
    assert last_line_of(path).in_frame is False


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_torn_bytes_are_those_that_readers_leave_out(path: Path, killed: bytes, cut: int) -> None:
    path.write_bytes(killed)
    assert torn_bytes(path) == 0
    path.write_bytes(killed[: len(killed) - cut])
    whole = last_line_of(path).end_bytes
    assert torn_bytes(path) == len(killed) - cut - whole
    assert (torn_bytes(path) > 0) == (cut > 0)


def test_torn_bytes_of_a_plain_journal_are_its_last_half_line(path: Path) -> None:
    path.write_bytes(b'{"type":"opened"}\n{"typ')
    assert torn_bytes(path) == 5


def test_a_plain_journal_of_an_older_agent_becomes_the_older_file(path: Path) -> None:
    writer = JournalWriter(path)
    writer.opened(first_line())
    decide(writer, 7.0)
    writer.close()
    journal(path, 2)
    assert times(path) == [0.0, 1.0]
    assert times(path.with_name("slot.journal.1")) == [7.0]


def test_a_damaged_block_is_named_by_its_line(path: Path) -> None:
    journal(path, 30)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(Corrupt, match=r"slot\.journal line \d+: "):
        list(read_journal(path))


def test_stays_bounded_in_compressed_bytes_and_each_file_reads_by_itself(path: Path) -> None:
    writer = JournalWriter(path, packed=True, max_bytes=8192)
    writer.opened(first_line())
    for beat in range(400):
        decide(writer, float(beat))
        if writer.full:
            writer.rotate(first_line())
    writer.close()
    older = path.with_name("slot.journal.1")
    assert path.stat().st_size + older.stat().st_size < 8192 + 1024
    kept = times(older) + times(path)
    assert kept == [float(beat) for beat in range(400 - len(kept), 400)]
    assert len(kept) > 60
    assert last_line_of(older).in_frame is False


@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("room_bytes", [0, 1, 4, 20])
def test_a_disk_that_is_full_at_any_byte_leaves_lines_that_need_none_of_the_lost(
    path: Path, small_disk: type[SmallDisk], small_frames: None, before: int, room_bytes: int
) -> None:
    writer = JournalWriter(path, packed=True)
    writer.opened(first_line())
    for beat in range(before):
        decide(writer, float(beat))
    for lost in (50.0, 51.0):
        small_disk.room_bytes = room_bytes
        with pytest.raises(OSError, match="No space left"):
            decide(writer, lost)
    small_disk.room_bytes = 1 << 20
    decide(writer, 99.0)
    writer.close()
    assert times(path) == [*(float(beat) for beat in range(before)), 99.0]
    assert torn_bytes(path) == 0


def test_a_rotation_onto_a_full_disk_loses_no_line_and_is_gone_on_with(
    path: Path, small_disk: type[SmallDisk]
) -> None:
    writer = JournalWriter(path, packed=True)
    writer.opened(first_line())
    decide(writer, 1.0)
    small_disk.room_bytes = 10
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            writer.rotate(first_line())
    small_disk.room_bytes = 1 << 20
    decide(writer, 2.0)
    writer.rotate(first_line())
    decide(writer, 3.0)
    writer.close()
    assert times(path.with_name("slot.journal.1")) == [1.0, 2.0]
    assert times(path) == [3.0]


def test_other_users_of_the_machine_read_no_journal(path: Path) -> None:
    before = os.umask(0)
    try:
        journal(path, 1)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_lines_that_cross_the_reader_s_chunks_are_whole(path: Path, monkeypatch: Any) -> None:
    journal(path, 40)
    for chunk_bytes in (1, 7, 100):
        monkeypatch.setattr(journal_frames, "_CHUNK_BYTES", chunk_bytes)
        assert times(path) == [float(beat) for beat in range(40)]


def test_a_line_of_several_blocks_is_whole_or_left_out(path: Path) -> None:
    long = "".join(str(zlib.crc32(str(n).encode())) for n in range(60_000))
    writer = JournalWriter(path, packed=True)
    writer.opened(msgspec.structs.replace(first_line(), snapshot={"long": long}))
    decide(writer, 1.0)
    size_bytes = path.stat().st_size
    writer.close()
    opened, _decided = read_journal(path)
    assert isinstance(opened, Opened)
    assert opened.snapshot == {"long": long}
    os.truncate(path, size_bytes // 2)
    assert list(read_journal(path)) == []
    journal(path, 1)
    assert list(map(type, read_journal(path))) == [Opened, Decided]


@pytest.mark.parametrize("fill", [b"\n", b"x"])
def test_a_forged_file_takes_little_memory(path: Path, fill: bytes) -> None:
    block = ((128 << 10) << 3 | 1 << 1).to_bytes(3, "little") + fill
    path.write_bytes(journal_frames.MAGIC + bytes([0, 9 << 3]) + 1000 * block)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="line 1"):
            list(read_journal(path))
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_compressed_line_without_end_is_refused(path: Path) -> None:
    path.write_bytes(zstandard.compress(b"x" * (MAX_LINE_BYTES + 1)))
    with pytest.raises(Corrupt, match="line 1: longer than"):
        list(read_journal(path))


def test_a_writer_knows_whether_its_file_is_in_place(path: Path) -> None:
    writer = JournalWriter(path, packed=True)
    writer.opened(first_line())
    decide(writer, 0.0)
    assert writer.in_place
    path.rename(path.with_name("moved"))
    assert not writer.in_place
    path.touch()
    assert not writer.in_place
    path.with_name("moved").replace(path)
    assert writer.in_place
    os.truncate(path, 0)
    decide(writer, 1.0)
    assert not writer.in_place
    writer.close()


def test_a_rotated_file_is_in_place_too(path: Path) -> None:
    writer = JournalWriter(path, max_bytes=2000, packed=True)
    writer.opened(first_line())
    while not writer.full:
        decide(writer, 0.0)
    writer.rotate(first_line())
    assert writer.in_place
    decide(writer, 1.0)
    assert writer.in_place
    writer.close()


@pytest.mark.parametrize(("kept_ratio", "crashes"), [(0.0, False), (0.5, False), (0.0, True)])
def test_after_a_cut_the_new_file_reads_by_itself(
    path: Path, small_frames: None, kept_ratio: float, crashes: bool
) -> None:
    """A file without its head can be read by nothing, and costs no older one."""
    older = path.with_name("slot.journal.1")
    journal(older, 3)
    writer = JournalWriter(path, packed=True)
    writer.opened(first_line())
    for beat in range(10):
        decide(writer, float(beat))
    os.truncate(path, int(path.stat().st_size * kept_ratio))
    for beat in range(10, 14):
        decide(writer, float(beat))
    left = path.read_bytes()
    writer.give_up()
    if crashes:
        path.write_bytes(left)
    journal(path, 2)
    assert times(path) == [0.0, 1.0]
    if not kept_ratio:
        assert times(older) == [0.0, 1.0, 2.0]
