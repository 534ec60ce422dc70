"""A shard's copy after a read that failed in the middle."""

from pathlib import Path

import numpy as np
import pytest

from harvester.contracts.errors import Corrupt, Exhausted
from weightsync.elements.state_hash import digest_of
from weightsync.layout.chunk_digests import MIN_CHUNK_BYTES, ChunkDigests
from weightsync.layout.manifest import FileRecord
from weightsync.reading.memory_budget import MemoryBudget
from weightsync.reading.shard_copy import ShardCopy
from weightsync.reading.spool import Spool
from weightsync.transport.directory import DirectorySource
from weightsync.transport.ranges import ByteSpan

CHUNKS = 6
DATA = np.random.default_rng(3).integers(0, 256, CHUNKS * MIN_CHUNK_BYTES, dtype=np.uint8)


def test_parts_of_a_read_that_failed_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shard").write_bytes(DATA.tobytes())
    digests = ChunkDigests(MIN_CHUNK_BYTES)
    digests.update(DATA)
    record = FileRecord(
        bytes=DATA.size,
        xxh3_128=digest_of(DATA),
        chunk_bytes=MIN_CHUNK_BYTES,
        chunks=digests.all(),
    )
    source = DirectorySource(tmp_path)
    copy = ShardCopy(
        source,
        "shard",
        record,
        Spool(MemoryBudget(1 << 30), tmp_path).stage(DATA.size),
        piece_bytes=MIN_CHUNK_BYTES,
        missing=lambda: Corrupt("gone"),
    )
    read, before = source.read_range, list[int]()

    def failing(path: str, offset: int, into: memoryview) -> None:
        before.append(offset)
        if len(before) == 3:
            raise Exhausted("the link is gone")
        read(path, offset, into)

    monkeypatch.setattr(source, "read_range", failing)
    wanted = [ByteSpan(10, DATA.size - MIN_CHUNK_BYTES)]
    with pytest.raises(Exhausted):
        copy.fetch_parts(wanted)
    copy.fetch_parts(wanted)
    whole = ByteSpan(0, DATA.size - MIN_CHUNK_BYTES)
    assert np.array_equal(copy.staged.read(whole), DATA[whole.start : whole.stop])
