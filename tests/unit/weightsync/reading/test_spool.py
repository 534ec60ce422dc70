"""Waiting bytes: the first in memory, the others in an unlinked file."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from harvester.contracts.errors import ConfigError, Exhausted
from weightsync.elements.state_hash import digest_of
from weightsync.reading.memory_budget import MemoryBudget
from weightsync.reading.spool import MemoryStaging, Spool
from weightsync.transport.ranges import ByteSpan

MIB = 1 << 20
DATA = np.random.default_rng(0).integers(0, 256, 3 * MIB, dtype=np.uint8)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(MemoryBudget(2 * MIB), tmp_path)


def test_a_fitting_part_stays_in_memory_and_the_rest_is_read_back(
    spool: Spool, tmp_path: Path
) -> None:
    small, large, other = spool.stage(MIB), spool.stage(DATA.size), spool.stage(100)
    assert (small.kept_bytes, large.kept_bytes, other.kept_bytes) == (MIB, 0, 0)
    for staged, size in ((small, MIB), (large, DATA.size), (other, 100)):
        staged.write(0, DATA[:size])
    for staged, size in ((small, MIB), (large, DATA.size), (other, 100)):
        assert np.array_equal(staged.read(ByteSpan(7, size)), DATA[7:size])
        assert staged.digest(ByteSpan(3, size)) == digest_of(DATA[3:size])
        into = np.zeros(50, dtype=np.uint8)
        staged.read_into(20, into)
        assert np.array_equal(into, DATA[20:70])
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_was_never_written_reads_as_something(spool: Spool) -> None:
    staged = spool.stage(DATA.size)
    staged.write(MIB, DATA[:10])
    assert staged.read(ByteSpan(0, DATA.size)).size == DATA.size
    assert np.array_equal(staged.read(ByteSpan(MIB, MIB + 10)), DATA[:10])


def test_memory_is_brought_in_without_a_copy(spool: Spool) -> None:
    staged = spool.stage(100)
    buffer = staged.buffer(ByteSpan(10, 20))
    buffer[:] = 7
    staged.write(10, buffer)
    assert isinstance(staged, MemoryStaging)
    assert staged.read(ByteSpan(9, 21))[1:11].tolist() == [7] * 10


def test_a_full_disk_is_exhausted(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    staged = spool.stage(DATA.size)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(Exhausted):
        staged.write(0, DATA)


def test_a_directory_that_is_none_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Spool(MemoryBudget(2 * MIB), tmp_path / "nowhere").stage(DATA.size)
