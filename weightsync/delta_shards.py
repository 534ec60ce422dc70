"""Shard files of one rank's share, written into a version's directory while more is encoded.

A safetensors file begins with all of its lengths, so a delta gathers payloads up to a limit and
writes them as one file; a full checkpoint's lengths are known and it is one file. Decides how large
a file becomes, never what an entry holds.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weightsync.agreement import Shard
from weightsync.bits import TensorSpec
from weightsync.chunk_digests import ChunkDigests, chunk_bytes_for
from weightsync.codec import Encoded, Encoding
from weightsync.manifest import FileRecord
from weightsync.shard import ShardTensor, shard_chunks
from weightsync.state_hash import new_digest
from weightsync.store_writer import FileWriter


class ShardFiles:
    """Names files after the rank, so that ranks share a directory; rank 0 gives the final names."""

    def __init__(self, directory: Path, write: FileWriter, *, rank: int, limit_bytes: int) -> None:
        self._directory = directory
        self._write = write
        self._rank = rank
        self._limit_bytes = limit_bytes
        self._open: dict[str, tuple[Encoded, str]] = {}
        self._open_bytes = 0
        self._done: list[Shard] = []

    def add(self, entry: str, encoded: Encoded, digest: str) -> None:
        """One entry of a delta; `digest` is of the state after it."""
        self._open[entry] = (encoded, digest)
        self._open_bytes += len(encoded.payload)
        if self._open_bytes >= self._limit_bytes:
            self._flush()

    def finish(self) -> list[Shard]:
        """Every file of the delta; none where nothing changed."""
        if self._open:
            self._flush()
        return self._done

    def write_full(
        self, tensors: Mapping[str, ShardTensor], digests: Mapping[str, str]
    ) -> list[Shard]:
        """One file with dense tensors; none where this rank has no entries."""
        if not tensors:
            return []
        checksums = {entry: digests[entry] for entry in tensors}
        self._done.append(self._written(tensors, checksums, dict.fromkeys(tensors, Encoding.DENSE)))
        return self._done

    def _flush(self) -> None:
        entries = sorted(self._open.items())
        tensors = {
            entry: ShardTensor(TensorSpec("U8", (len(encoded.payload),)), encoded.payload)
            for entry, (encoded, _) in entries
        }
        checksums = {entry: digest for entry, (_, digest) in entries}
        encodings = {entry: encoded.encoding for entry, (encoded, _) in entries}
        self._open = {}
        self._open_bytes = 0
        self._done.append(self._written(tensors, checksums, encodings))

    def _written(
        self,
        tensors: Mapping[str, ShardTensor],
        checksums: Mapping[str, str],
        encodings: dict[str, Encoding],
    ) -> Shard:
        name = f"rank-{self._rank:05d}-{len(self._done) + 1:05d}.safetensors"
        whole = new_digest()
        chunk_bytes = chunk_bytes_for(sum(memoryview(t.data).nbytes for t in tensors.values()))
        chunks = ChunkDigests(chunk_bytes)

        def hashed() -> Iterator[Any]:
            for buffer in shard_chunks(tensors, checksums):
                whole.update(buffer)
                chunks.update(buffer)
                yield buffer

        size = self._write(self._directory / name, hashed())
        record = FileRecord(size, whole.hexdigest(), chunk_bytes, chunks.all())
        return Shard(name, record, encodings)
