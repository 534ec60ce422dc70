"""Reads an index without a framework: a version's shards for a relay, a line for people."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import xxhash

from harvester.contracts.errors import UNDECODABLE, Corrupt
from weightsync.layout.index_summary import FileSummary, IndexSummary
from weightsync.layout.names import INDEX_FILE, MAX_INDEX_BYTES, READY_FILE, VersionRef, refs_in
from weightsync.layout.tables import MAX_TABLE_BYTES, plain_table
from weightsync.transport.access import Access
from weightsync.transport.location import StoreRoot, source_at
from weightsync.transport.source import StoreSource, no_store

_FOREIGN = "of another system"
"""End of a summary of another system's version, which lacks READY."""
_MAX_FILES = 1 << 16
_MAX_FILES_BYTES = 2 * MAX_INDEX_BYTES
"""Chunk digests, most of an index that has them, compress to half: a whole index may hold more."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    key: str
    """Key of a cached copy: other content has another key."""
    size_bytes: int | None
    xxh3_128: str | None
    """Digest of the file; None for a foreign store, whose receivers check every tensor."""


def published_files(
    index: bytes, *, table_limit_bytes: int = MAX_TABLE_BYTES
) -> Mapping[str, PublishedFile]:
    """The shards of one version by name; raises Corrupt, also for more than a relay keeps."""
    read = _decoded(plain_table(index, limit_bytes=table_limit_bytes), IndexSummary)
    records = read.weight_map if read.rosemux is None else read.rosemux.files
    if memoryview(records).nbytes > _MAX_FILES_BYTES:
        raise Corrupt("an index with too much about its files")
    if read.rosemux is not None:
        ours = _decoded(records, dict[str, FileSummary])
        found = {shard: _ours(record) for shard, record in ours.items()}
    else:
        digest = xxhash.xxh3_128(index)
        shards = set(_decoded(records, dict[str, str]).values())
        found = {shard: _foreign(digest.copy(), shard) for shard in shards}
    if len(found) > _MAX_FILES:
        raise Corrupt(f"an index with {len(found)} files; the limit is {_MAX_FILES}")
    return found


def summary_line(index: bytes) -> str:
    """One-line description of a version, for people; raises Corrupt."""
    read = _decoded(plain_table(index), IndexSummary)
    kind = "full"
    if read.metadata.delta_encoding is not None:
        kind = f"{read.metadata.delta_encoding} on {read.metadata.base_version}"
    tensors = len(_decoded(read.weight_map, dict[str, str]))
    if read.rosemux is None:
        return f"{kind}, {tensors} tensors, {_FOREIGN}"
    files = _decoded(read.rosemux.files, dict[str, FileSummary])
    return f"{kind}, {tensors} tensors, {sum(file.bytes for file in files.values()) / 1e6:.1f} MB"


def _decoded(raw: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNDECODABLE as error:
        raise Corrupt(f"an index that cannot be read: {error}") from error


def _ours(record: FileSummary) -> PublishedFile:
    digest = record.xxh3_128
    if len(digest) != 32 or set(digest) - set("0123456789abcdef") or record.bytes < 0:
        raise Corrupt(f"a file record of {record.bytes} bytes with digest {digest[:40]!r}")
    return PublishedFile(key=f"{digest}-{record.bytes}", size_bytes=record.bytes, xxh3_128=digest)


def _foreign(digest: xxhash.xxh3_128, shard: str) -> PublishedFile:
    digest.update(shard.encode())
    return PublishedFile(key=f"{digest.hexdigest()}-foreign", size_bytes=None, xxh3_128=None)


def list_store(location: str, access: Access) -> Iterator[str]:
    """Lines to print; raises ConfigError if the location has neither a store nor stores."""
    with closing(source_at(location, access)) as source, suppress(FileNotFoundError):
        if refs := refs_in(source.directories()):
            yield from _versions(source, sorted(refs, key=lambda ref: (ref.version, ref.kind)))
            return
    names: tuple[str, ...] = ()
    with suppress(FileNotFoundError):
        names = StoreRoot(location, access).names()
    if not names:
        raise no_store(location)
    yield from names


def _versions(source: StoreSource, refs: Iterable[VersionRef]) -> Iterator[str]:
    latest = (source.latest() or b"").decode(errors="replace").strip()
    for ref in refs:
        mark = "LATEST" if ref.directory == latest else ""
        yield f"{ref.directory:24} {_summary(source, ref):60} {mark}".rstrip()


def _summary(source: StoreSource, ref: VersionRef) -> str:
    try:
        summary = summary_line(source.read_small(f"{ref.directory}/{INDEX_FILE}", MAX_INDEX_BYTES))
    except FileNotFoundError:
        return "unfinished"
    except Corrupt as error:
        return f"broken: {error}"
    if summary.endswith(_FOREIGN) or source.has(f"{ref.directory}/{READY_FILE}"):
        return summary
    return f"{summary}, not marked {READY_FILE}"
