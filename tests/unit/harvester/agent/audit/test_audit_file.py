"""The audit's files: rotated, bounded by bytes and age, whole after a crash or a full disk."""

import os
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from harvester.agent.audit.audit_file import AuditFile
from harvester.contracts.audit import SCHEMA, AuditEvent, audit_files, read_audit

DAY_S = 86_400


def event(number: int, *, day: int = 1, reason: str = "") -> AuditEvent:
    time = f"2026-01-{day:02}T00:00:00.000+00:00"
    return AuditEvent(
        schema=SCHEMA, time=time, t_s=float(number), node="n", event="slot_state", reason=reason
    )


def numbers(path: Path) -> list[float]:
    return [found.t_s for found in read_audit(path) if isinstance(found, AuditEvent)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "audit.jsonl"


def made(path: Path, *, max_bytes: int = 1 << 20, max_days: float = 28.0) -> AuditFile:
    return AuditFile(path, max_bytes=max_bytes, max_days=max_days)


def test_every_event_is_in_the_file_at_once_and_no_other_user_reads_it(path: Path) -> None:
    before = os.umask(0)
    try:
        file = made(path)
        file.append(event(1))
    finally:
        os.umask(before)
    assert numbers(path) == [1]
    assert path.stat().st_mode & 0o777 == 0o640
    file.close()


def test_a_new_day_begins_a_new_file_also_for_a_new_agent(path: Path) -> None:
    first = made(path)
    first.append(event(1, day=1))
    first.append(event(2, day=1))
    first.close()
    second = made(path)
    second.append(event(3, day=1))
    second.append(event(4, day=2))
    second.close()
    assert [numbers(file) for file in audit_files(path)] == [[1, 2, 3], [4]]


def test_bytes_are_bounded_by_the_removal_of_the_oldest_file(path: Path) -> None:
    file = made(path, max_bytes=16_000)
    for number in range(400):
        file.append(event(number, reason="x" * 100))
    file.close()
    files = audit_files(path)
    kept = [number for one in files for number in numbers(one)]
    assert sum(one.stat().st_size for one in files) <= 16_000
    assert kept == [float(number) for number in range(int(kept[0]), 400)]
    assert len(kept) > 50


def aged(path: Path, days: list[int]) -> AuditFile:
    """An audit with one file for each age in days, the oldest first, and a current one."""
    file = made(path, max_days=28)
    for place, _ in enumerate(days):
        file.append(event(place, day=place + 1))
    file.append(event(99, day=20))
    for days_old, one in zip(days, audit_files(path), strict=False):
        seconds = path.stat().st_mtime - days_old * DAY_S
        os.utime(one, (seconds, seconds))
    return file


def test_files_beyond_their_days_are_removed_and_younger_ones_stay(path: Path) -> None:
    file = aged(path, [40, 27])
    file.append(event(100, day=21))
    file.close()
    assert [number for one in audit_files(path) for number in numbers(one)] == [1, 99, 100]


def test_a_clock_that_jumps_ahead_costs_two_files_and_not_the_history(path: Path) -> None:
    file = aged(path, [3655, 3654, 3653, 3652])
    file.append(event(100, day=21))
    file.close()
    assert [number for one in audit_files(path) for number in numbers(one)] == [2, 3, 99, 100]


def test_a_clock_that_was_ahead_for_a_while_makes_no_later_file_old(path: Path) -> None:
    file = aged(path, [3, 2, -3650, 0])
    file.append(event(100, day=21))
    file.close()
    assert [number for one in audit_files(path) for number in numbers(one)] == [0, 1, 2, 3, 99, 100]


def test_a_line_torn_by_a_kill_costs_that_event_alone(path: Path) -> None:
    killed = made(path)
    killed.append(event(1))
    killed.append(event(2))
    killed.close()
    os.truncate(path, path.stat().st_size - 9)
    next_agent = made(path)
    next_agent.append(event(3))
    next_agent.close()
    found = list(read_audit(path))
    assert numbers(path) == [1, 3]
    assert [one for one in found if isinstance(one, str)] == [
        one for one in found if str(one).startswith("audit.jsonl line 2 is skipped")
    ]
    assert len(found) == 3


class SmallDisk(FileIO):
    """Takes what it has room for, as a full disk does."""

    room_bytes = 1 << 20

    def write(self, data: Any) -> int:
        taken = super().write(data[: SmallDisk.room_bytes])
        SmallDisk.room_bytes -= taken
        return taken


@pytest.mark.parametrize("room_bytes", [0, 1, 30])
def test_a_full_disk_leaves_no_part_of_an_event(
    path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    monkeypatch.setattr(AuditFile, "_open", lambda self: SmallDisk(self.path, "ab"))
    monkeypatch.setattr(SmallDisk, "room_bytes", 1 << 20)
    file = made(path)
    file.append(event(1))
    SmallDisk.room_bytes = room_bytes
    with pytest.raises(OSError, match="No space left"):
        file.append(event(2))
    SmallDisk.room_bytes = 1 << 20
    file.append(event(3))
    file.close()
    assert numbers(path) == [1, 3]
    assert path.read_bytes().count(b"\n") == 2


def test_an_audit_that_was_moved_goes_on_in_a_new_file(path: Path) -> None:
    file = made(path)
    file.append(event(1))
    path.rename(path.with_name("taken"))
    file.append(event(2))
    file.close()
    assert numbers(path) == [2]
