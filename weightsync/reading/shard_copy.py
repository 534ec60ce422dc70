"""A receiver's own copy of a shard: all of it, or the chunks that it needs, verified by digest.

Wrong bytes may come from a faulty copy on the way, so they are requested once more before the shard
is refused. The caller decides which bytes are needed.
"""

from collections.abc import Callable, Iterable

from harvester.contracts.errors import Corrupt, RoseMuxError
from weightsync.elements.bits import Bytes
from weightsync.layout.chunk_digests import chunk_digest, digest_at
from weightsync.layout.manifest import FileRecord
from weightsync.layout.shard import ShardHeader, read_header
from weightsync.reading.chunks import ChunkMap
from weightsync.reading.spool import StagedFile
from weightsync.transport.ranges import ByteSpan
from weightsync.transport.source import StoreSource, each_span

_READS = 2


class ShardCopy:
    """The bytes of `path` in `staged`. One read takes at most `piece_bytes` of memory."""

    def __init__(
        self,
        source: StoreSource,
        path: str,
        record: FileRecord | None,
        staged: StagedFile,
        *,
        piece_bytes: int,
        missing: Callable[[], RoseMuxError],
    ) -> None:
        """`missing` makes the error to raise if the shard does not exist."""
        self._source = source
        self._path = path
        self._record = record
        chunk_bytes = record.chunk_bytes if record else 0
        self._chunks = ChunkMap(staged.size_bytes, chunk_bytes=chunk_bytes) if chunk_bytes else None
        """Chunks still to be fetched; None without digests of parts, and once the whole is here."""
        self.staged = staged
        self._piece_bytes = piece_bytes
        self._missing = missing
        self.bytes_read = 0
        """Number of bytes requested from the source so far."""

    @property
    def has_chunks(self) -> bool:
        """Whether a part of it can be verified without the rest."""
        return self._chunks is not None

    def fetch(self) -> None:
        """Fetch the whole shard and check its digest; raises Corrupt."""
        whole = ByteSpan(0, self.staged.size_bytes)
        for _ in range(_READS):
            self.bytes_read += whole.stop
            self._read(whole.pieces(self._piece_bytes), self._read_unchecked)
            if self._record is None or self.staged.digest(whole) == self._record.xxh3_128:
                self._chunks = None
                return
            self._source.doubt(self._path)
        raise Corrupt(f"{self._source}/{self._path}: its digest is not the published one")

    def header(self) -> ShardHeader:
        """The shard's tensors and their offsets; raises Corrupt."""

        def read(start: int, stop: int) -> bytes:
            self.fetch_parts([ByteSpan(start, stop)])
            return self.staged.read(ByteSpan(start, stop)).tobytes()

        what = f"{self._source}/{self._path}"
        return read_header(read, file_bytes=self.staged.size_bytes, what=what)

    def fetch_parts(self, spans: Iterable[ByteSpan]) -> None:
        """Fetch and check the chunks that contain these spans; raises Corrupt. No-op after `fetch`,
        which a shard without chunk digests needs first."""
        chunks = self._chunks
        if chunks is None:
            return
        for span in sorted(spans):
            chunks.want(span)
        missing = [*iter(lambda: chunks.claim(self._piece_bytes), None)]
        try:
            self._read(missing, self._read_checked)
        except BaseException:
            for run in missing:
                chunks.lost(run)
            raise
        for run in missing:
            chunks.arrived(run)
        self.bytes_read += sum(span.size_bytes for span in missing)

    def _read(self, spans: Iterable[ByteSpan], read: Callable[[ByteSpan], None]) -> None:
        try:
            each_span(self._source, spans, read)
        except FileNotFoundError as error:
            raise self._missing() from error

    def _read_unchecked(self, span: ByteSpan) -> None:
        into = self.staged.buffer(span)
        self._source.read_range(self._path, span.start, into.data)
        self.staged.write(span.start, into)

    def _read_checked(self, span: ByteSpan) -> None:
        into = self.staged.buffer(span)
        for _ in range(_READS):
            self._source.read_range(self._path, span.start, into.data)
            if self._is_published(span, into):
                self.staged.write(span.start, into)
                return
            self._source.doubt(self._path)
        raise Corrupt(f"{self._source}/{self._path}: the digest of a part is not the published one")

    def _is_published(self, span: ByteSpan, data: Bytes) -> bool:
        """Whether every chunk of the span has its published digest; the span begins at a chunk."""
        record = self._record
        return record is not None and all(
            chunk_digest(data[at : at + record.chunk_bytes])
            == digest_at(record.chunks, (span.start + at) // record.chunk_bytes)
            for at in range(0, span.size_bytes, record.chunk_bytes)
        )
