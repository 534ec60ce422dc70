"""A journal that cannot be written costs lines, and neither a decision nor the process."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harvester.contracts.ids import JobId, WeightVersion
from harvester.contracts.journal import JournalWriter, Opened, read_journal
from scheduler.decision_log import DecisionLog
from scheduler.gateway.policy.versions import VersionPolicy
from scheduler.gateway.policy.versions_events import VersionPublished
from scheduler.sim.replay import replay_journal
from tests.unit.harvester.contracts.test_journal import SmallDisk


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> type[SmallDisk]:
    monkeypatch.setattr(JournalWriter, "_open", lambda self: SmallDisk(self._path, "ab"))
    monkeypatch.setattr(SmallDisk, "room_bytes", 1 << 20)
    return SmallDisk


class Decisions:
    """A policy and its log, decision by decision."""

    def __init__(self, directory: Path, *, max_bytes: int = 1 << 20) -> None:
        self.policy = VersionPolicy.from_config({})
        self.path = directory / f"{self.policy.NAME}.jsonl"
        self.log = DecisionLog(directory, self.policy, {}, max_bytes=max_bytes, now=0.0)
        self.count = 0

    def make(self, count: int = 1) -> None:
        for _ in range(count):
            self.count += 1
            sample = VersionPublished(job=JobId("j"), store="s", version=WeightVersion(self.count))
            effects = self.policy.observe(sample, now=float(self.count))
            self.log.decided(now=float(self.count), sample=sample, effects=effects)

    @property
    def counted(self) -> list[int]:
        """Missing decisions, as each first line of the file counts them."""
        return [line.missing for line in read_journal(self.path) if isinstance(line, Opened)]


@pytest.mark.parametrize("room_bytes", [0, 7, 100])
def test_decisions_on_a_full_disk_are_counted_logged_once_and_gone_on_from(
    tmp_path: Path, disk: type[SmallDisk], room_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    decisions = Decisions(tmp_path)
    decisions.make(2)
    disk.room_bytes = room_bytes
    decisions.make(3)
    assert (decisions.log.missing, decisions.log.missing_total) == (3, 3)
    assert "No space left" in decisions.log.fault
    disk.room_bytes = 1 << 20
    decisions.make(3)
    assert (decisions.log.fault, decisions.log.missing_total) == ("", 4)
    assert decisions.counted == [0, 4]
    assert [each.levelno for each in caplog.records] == [logging.ERROR, logging.WARNING]
    decisions.log.close()
    assert replay_journal(decisions.path).difference is None


class Snapshots:
    NAME = "scheduler.policy.snapshots"

    def __init__(self) -> None:
        self.taken = 0

    def snapshot(self) -> dict[str, int]:
        self.taken += 1
        return {}


def test_decisions_on_a_full_disk_take_one_snapshot_a_second(
    tmp_path: Path, disk: type[SmallDisk]
) -> None:
    policy = Snapshots()
    log = DecisionLog(tmp_path, policy, {}, max_bytes=1 << 20, now=0.0)
    disk.room_bytes = 0
    sample = VersionPublished(job=JobId("j"), store="s", version=WeightVersion(1))
    for at in range(300):
        log.decided(now=1.0 + 0.01 * at, sample=sample, effects=())
    assert log.missing == 300
    assert policy.taken <= 3
    log.close()


def test_a_log_begins_on_a_full_disk_and_is_written_once_there_is_room(
    tmp_path: Path, disk: type[SmallDisk]
) -> None:
    disk.room_bytes = 10
    decisions = Decisions(tmp_path)
    assert decisions.log.fault
    decisions.make(2)
    disk.room_bytes = 1 << 20
    decisions.make(2)
    assert decisions.counted == [3]
    decisions.log.close()
    replayed = replay_journal(decisions.path)
    assert (replayed.difference, replayed.decisions) == (None, 1)


def test_a_log_goes_on_while_nothing_is_decided(tmp_path: Path, disk: type[SmallDisk]) -> None:
    decisions = Decisions(tmp_path)
    disk.room_bytes = 0
    decisions.make(2)
    decisions.log.check(now=3.0)
    assert decisions.log.fault
    disk.room_bytes = 1 << 20
    for _ in range(2):
        decisions.log.check(now=4.0)
    assert decisions.log.fault == ""
    decisions.make()
    assert decisions.counted == [0, 2]
    decisions.log.close()
    assert replay_journal(decisions.path).difference is None


def test_a_rotation_onto_a_full_disk_misses_no_decision(
    tmp_path: Path, disk: type[SmallDisk]
) -> None:
    decisions = Decisions(tmp_path, max_bytes=4096)
    while decisions.path.stat().st_size < 1800:
        decisions.make()
    older = decisions.path.with_name(decisions.path.name + ".1")
    (older / "in_the_way").mkdir(parents=True)
    decisions.make(4)
    assert decisions.log.fault
    assert decisions.log.missing_total == 0
    (older / "in_the_way").rmdir()
    older.rmdir()
    decisions.make(2)
    assert decisions.log.fault == ""
    decisions.log.close()
    for file in (older, decisions.path):
        assert replay_journal(file).difference is None


def test_no_decision_of_a_new_configuration_follows_a_first_line_of_the_old_one(
    tmp_path: Path, disk: type[SmallDisk]
) -> None:
    decisions = Decisions(tmp_path)
    decisions.make()
    disk.room_bytes = 0
    config = {"min_dedicated": 3}
    decisions.policy = VersionPolicy.from_config(config)
    decisions.log.reconfigure(decisions.policy, config, restart_needed=("engines",), now=2.0)
    disk.room_bytes = 1 << 20
    decisions.make()
    assert decisions.log.missing == 1
    decisions.make(2)
    opened = [line for line in read_journal(decisions.path) if isinstance(line, Opened)]
    assert [(line.config, line.restart_needed, line.missing) for line in opened] == [
        ({}, (), 0),
        (config, ("engines",), 2),
    ]
    decisions.log.close()
    assert replay_journal(decisions.path).difference is None


def _moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def _cut(path: Path) -> None:
    path.write_bytes(b"")


def _cut_and_grown(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:30])


def _removed_with_its_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


@pytest.mark.parametrize(
    "take", [_moved, Path.unlink, _cut, _cut_and_grown, _removed_with_its_folder]
)
def test_a_journal_that_another_program_took_away_is_noticed_and_begun_anew(
    tmp_path: Path, take: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    decisions = Decisions(tmp_path / "journal")
    decisions.make(2)
    decisions.log.check(now=2.0)
    assert decisions.log.missing_total == 0
    take(decisions.path)
    decisions.make()
    assert decisions.log.check(now=2.5) is None, "once a second"
    assert decisions.log.check(now=3.0) is not None
    decisions.make(2)
    assert decisions.counted == [1], "for all that went with the file"
    assert (decisions.log.fault, decisions.log.missing, decisions.log.missing_total) == ("", 0, 1)
    assert [each.levelno for each in caplog.records] == [logging.ERROR, logging.WARNING]
    assert "moved, removed or cut by another program" in caplog.text
    decisions.log.close()
    replayed = replay_journal(decisions.path)
    assert (replayed.difference, replayed.decisions) == (None, 2)


def test_a_log_that_records_nothing_looks_at_nothing() -> None:
    log = DecisionLog(None, VersionPolicy.from_config({}), {}, max_bytes=1 << 20, now=0.0)
    assert log.check(now=1.0) is None


def test_a_journal_that_is_no_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "scheduler.policy.versions.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        Decisions(tmp_path)
