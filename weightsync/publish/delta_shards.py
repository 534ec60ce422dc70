"""Shard files of one rank's share, written into a version's directory while more is encoded.

A safetensors file begins with all of its lengths, so a delta gathers payloads up to a limit and
writes them as one file; a full checkpoint's lengths are known and it is one file. Decides how large
a file becomes, never what an entry holds.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import xxhash

from weightsync.elements.bits import Layout, shared_spec
from weightsync.encoding.codec import Encoded, Encoding
from weightsync.layout.chunk_digests import ChunkDigests, chunk_bytes_for
from weightsync.layout.manifest import FileRecord
from weightsync.layout.shard import MAX_HEADER_BYTES, header_room, shard_chunks, shard_layouts
from weightsync.publish.agreement import Shard
from weightsync.publish.store_writer import DeltaDraft, Draft


class ShardFiles:
    """Names files after the rank, so that ranks share a directory; rank 0 gives the final names.

    With `may_pack`, large headers of deltas are packed, which other systems do not read.
    """

    def __init__(self, draft: DeltaDraft, *, rank: int, limit_bytes: int, may_pack: bool) -> None:
        self._draft = draft
        self._may_pack = may_pack
        self._rank = rank
        self._limit_bytes = limit_bytes
        self._open: dict[str, Encoded] = {}
        self._sums: dict[str, int] = {}
        self._open_bytes, self._left_header = 0, MAX_HEADER_BYTES
        self._done: list[Shard] = []

    def add(self, entry: str, encoded: Encoded, new_sum: int | None = None) -> None:
        """One entry of a delta; `new_sum`: of the tensor that it leads to, if known."""
        room = header_room(entry)
        if self._open and room > self._left_header:
            self._flush()
        self._open[entry] = encoded
        if new_sum is not None:
            self._sums[entry] = new_sum
        self._open_bytes += len(encoded.payload)
        self._left_header -= room
        if self._open_bytes >= self._limit_bytes:
            self._flush()

    def finish(self) -> list[Shard]:
        """Every file of the delta; none where nothing changed."""
        if self._open:
            self._flush()
        self._draft.settle()
        return self._done

    def _flush(self) -> None:
        entries = dict(sorted(self._open.items()))
        layout = {e: shared_spec("U8", (len(encoded.payload),)) for e, encoded in entries.items()}
        checksums = {entry: encoded.digest for entry, encoded in entries.items()}
        encodings = {entry: encoded.encoding for entry, encoded in entries.items()}
        # A file has the sums of all its entries or of none.
        sums = self._sums if self._sums.keys() == entries.keys() else {}
        self._open, self._sums = {}, {}
        self._open_bytes, self._left_header = 0, MAX_HEADER_BYTES
        name = _file_name(self._rank, len(self._done) + 1)
        content = _Content(
            layout,
            lambda entry: entries[entry].payload,
            checksums,
            sums,
            may_pack=self._may_pack,
        )
        self._draft.write(name, content)
        self._done.append(Shard(name, content.record, encodings))


def full_shards(
    draft: Draft,
    layout: Layout,
    read: Callable[[str], Any],
    digests: Mapping[str, str],
    sums: Mapping[str, int],
    *,
    rank: int,
) -> list[Shard]:
    """Write files of dense tensors; none where this rank has no entries. `sums`: of all entries, or
    empty."""
    contents = {
        _file_name(rank, number): _Content(
            group,
            read,
            {entry: digests[entry] for entry in group},
            {entry: sums[entry] for entry in group} if sums else {},
        )
        for number, group in enumerate(shard_layouts(layout, draft.full_file_bytes), 1)
    }
    draft.write_all(contents)
    return [
        Shard(name, content.record, dict.fromkeys(content.layout, Encoding.DENSE))
        for name, content in contents.items()
    ]


def _file_name(rank: int, number: int) -> str:
    return f"rank-{rank:05d}-{number:05d}.safetensors"


class _Content:
    """A file's bytes, the same in each iteration; `record` is theirs after the first."""

    def __init__(
        self,
        layout: Layout,
        read: Callable[[str], Any],
        checksums: Mapping[str, str],
        sums: Mapping[str, int],
        *,
        may_pack: bool = False,
    ) -> None:
        self.layout = layout
        self._may_pack = may_pack
        self._read = read
        self.record = FileRecord(0, "")
        self._checksums, self._sums = checksums, sums

    def __iter__(self) -> Iterator[Any]:
        whole, size = xxhash.xxh3_128(), 0
        chunk_bytes = chunk_bytes_for(sum(spec.size_bytes for spec in self.layout.values()))
        chunks = ChunkDigests(chunk_bytes)
        for buffer in shard_chunks(
            self.layout, self._read, self._checksums, sums=self._sums, may_pack=self._may_pack
        ):
            whole.update(buffer)
            chunks.update(buffer)
            size += memoryview(buffer).nbytes
            yield buffer
        self.record = FileRecord(size, whole.hexdigest(), chunk_bytes, chunks.all())
