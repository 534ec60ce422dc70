"""The journal on disk."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harvester.contracts.errors import Corrupt
from harvester.contracts.journal import (
    MAX_LINE_BYTES,
    Decided,
    JournalWriter,
    Line,
    Opened,
    config_hash,
    read_journal,
)
from tests.unit.harvester.contracts.conftest import SmallDisk


class Sample(msgspec.Struct, frozen=True):
    in_flight: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    reason: str


def first_line(**fields: Any) -> Opened:
    config = {"epsilon": 0.05}
    return Opened(
        actor="agent:s", policy="slot", config=config, config_hash=config_hash(config), **fields
    )


def decide(writer: JournalWriter, t_s: float) -> None:
    writer.decided(now=t_s, sample=Sample(in_flight=3), effects=(Close("breach"),))


def times(lines: list[Line]) -> list[float]:
    return [line.t_s for line in lines if isinstance(line, Decided)]


Opener = Callable[..., JournalWriter]


@pytest.fixture
def opened_journal() -> Iterator[Opener]:
    writers: list[JournalWriter] = []

    def make(path: Path, **settings: int) -> JournalWriter:
        writers.append(JournalWriter(path, **settings))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "slot.journal"


def test_gives_back_every_decision_with_its_sample_and_configuration(
    path: Path, opened_journal: Opener
) -> None:
    writer = opened_journal(path)
    writer.opened(first_line())
    decide(writer, 1.5)
    opened, decided = read_journal(path)
    assert isinstance(opened, Opened)
    assert opened.wall != ""
    assert msgspec.structs.replace(opened, wall="") == first_line()
    assert decided == Decided(
        t_s=1.5,
        config_hash=opened.config_hash,
        sample={"in_flight": 3},
        effects=({"type": "close", "reason": "breach"},),
    )


def test_each_line_is_on_disk_before_the_next_decision(path: Path, opened_journal: Opener) -> None:
    writer = opened_journal(path)
    writer.opened(first_line())
    decide(writer, 1.0)
    assert times(list(read_journal(path))) == [1.0]


def test_a_torn_last_line_is_left_out(path: Path, opened_journal: Opener) -> None:
    writer = opened_journal(path)
    writer.opened(first_line())
    decide(writer, 1.0)
    decide(writer, 2.0)
    os.truncate(path, path.stat().st_size - 3)
    assert times(list(read_journal(path))) == [1.0]


def test_a_restart_after_a_crash_loses_the_torn_line_and_nothing_else(
    path: Path, opened_journal: Opener
) -> None:
    crashed = opened_journal(path)
    crashed.opened(first_line())
    decide(crashed, 1.0)
    decide(crashed, 2.0)
    os.truncate(path, path.stat().st_size - 3)
    restarted = opened_journal(path)
    restarted.opened(first_line())
    decide(restarted, 3.0)
    lines = list(read_journal(path))
    assert times(lines) == [1.0, 3.0]
    assert [type(line) for line in lines] == [Opened, Decided, Opened, Decided]


def test_a_restart_over_nothing_but_a_torn_line_begins_anew(
    path: Path, opened_journal: Opener
) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"type":"ope')
    writer = opened_journal(path)
    writer.opened(first_line())
    assert len(list(read_journal(path))) == 1


def test_names_the_line_that_is_corrupt(path: Path, opened_journal: Opener) -> None:
    writer = opened_journal(path)
    writer.opened(first_line())
    decide(writer, 1.0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"type":"decided","t_s":"no"}\n' + lines[1])
    with pytest.raises(Corrupt, match=r"slot\.journal line 2"):
        list(read_journal(path))


def test_refuses_a_line_without_end(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"x" * (MAX_LINE_BYTES + 1))
    with pytest.raises(Corrupt, match="line 1: longer than"):
        list(read_journal(path))


def test_stays_bounded_and_each_file_replays_by_itself(path: Path, opened_journal: Opener) -> None:
    max_bytes = 8192
    writer = opened_journal(path, max_bytes=max_bytes)
    writer.opened(first_line())
    for beat in range(300):
        decide(writer, float(beat))
        if writer.full:
            writer.rotate(first_line(snapshot={"beat": beat}))
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["slot.journal", "slot.journal.1"]
    assert sum(file.stat().st_size for file in files) < max_bytes + 1024
    newer, older = (list(read_journal(file)) for file in files)
    assert isinstance(newer[0], Opened)
    assert isinstance(older[0], Opened)
    assert newer[0].snapshot == {"beat": times(older)[-1]}
    assert (times(older) + times(newer))[-1] == 299.0


def test_a_rotation_that_fails_leaves_a_journal_that_goes_on(
    path: Path, opened_journal: Opener
) -> None:
    writer = opened_journal(path, max_bytes=256)
    writer.opened(first_line())
    blocker = path.with_name(path.name + ".1")
    (blocker / "in_the_way").mkdir(parents=True)
    with pytest.raises(OSError, match=r"slot\.journal"):
        writer.rotate(first_line())
    decide(writer, 9.0)
    assert times(list(read_journal(path))) == [9.0]


@pytest.mark.parametrize("room_bytes", [0, 1, 7, 60, 100])
def test_a_disk_that_is_full_at_any_byte_leaves_whole_lines_and_a_writer_that_goes_on(
    path: Path, small_disk: type[SmallDisk], room_bytes: int
) -> None:
    writer = JournalWriter(path)
    writer.opened(first_line())
    small_disk.room_bytes = room_bytes
    with pytest.raises(OSError, match="No space left"):
        decide(writer, 1.0)
    assert path.read_bytes().endswith(b"\n")
    small_disk.room_bytes = 1 << 20
    writer.opened(first_line(missing=1))
    decide(writer, 2.0)
    small_disk.room_bytes = 0
    writer.close()
    lines = list(read_journal(path))
    assert times(lines) == [2.0]
    assert [line.missing for line in lines if isinstance(line, Opened)] == [0, 1]


def test_a_rotation_onto_a_full_disk_loses_no_line_and_is_gone_on_with(
    path: Path, small_disk: type[SmallDisk]
) -> None:
    writer = JournalWriter(path, max_bytes=512)
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
    assert times(list(read_journal(path.with_name("slot.journal.1")))) == [1.0, 2.0]
    assert times(list(read_journal(path))) == [3.0]
    assert isinstance(next(read_journal(path)), Opened)


def test_the_hash_of_a_configuration_knows_values_and_no_order() -> None:
    assert config_hash({"a": 1, "b": {"c": 2, "d": 3}}) == config_hash(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )
    assert config_hash({"a": 1}) != config_hash({"a": 2})


def test_other_users_of_the_machine_read_no_journal(path: Path, opened_journal: Opener) -> None:
    before = os.umask(0)
    try:
        writer = opened_journal(path, max_bytes=512)
        writer.opened(first_line())
        while not writer.full:
            decide(writer, 1.0)
        writer.rotate(first_line())
        older = path.with_name("older.journal")
        older.touch(mode=0o666)
        opened_journal(older).opened(first_line())
    finally:
        os.umask(before)
    for file in (path, path.with_name("slot.journal.1"), older):
        assert file.stat().st_mode & 0o777 == 0o640
