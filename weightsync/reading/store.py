"""A store of weight versions as readers see it, independent of the storage of its bytes.

    LATEST                     name of the newest version, replaced atomically
    weight_v000007/            one version: a delta on its base, or a full checkpoint
      model.safetensors.index.json   model-00001-of-00001.safetensors   READY
    anchor_v000025/            the same state as weight_v000025, as a full checkpoint

Readers believe a RoseMux directory only if READY is in it. Never writes anything.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import compress
from pathlib import Path

from harvester.contracts.errors import ConfigError, Corrupt, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Layout, TensorSpec
from weightsync.layout.manifest import Manifest, decoded_manifest
from weightsync.layout.names import (
    INDEX_FILE,
    LATEST_FILE,
    MAX_INDEX_BYTES,
    READY_FILE,
    Kind,
    VersionRef,
    latest_line,
    named_ref,
    refs_in,
)
from weightsync.layout.shard import read_header
from weightsync.reading.shard_copy import ShardCopy
from weightsync.reading.spool import Spool
from weightsync.transport.base_checkpoint import BaseCheckpoint
from weightsync.transport.location import source_at
from weightsync.transport.source import StoreSource, no_store

MAX_SHARD_BYTES = 1 << 38
"""Bound on one shard: no publisher writes 256 GiB into one file."""
_AT_ONCE = 8
_PIECE_BYTES = 256 << 10
"""Size of the smallest read."""
_HEAD_BYTES = 64 << 10
"""Bytes read of a shard before its header's length is known: most headers fit."""


class Store:
    """Reads one store: a directory, a URL or a source. Raises ConfigError without a store."""

    def __init__(
        self, at: Path | str | StoreSource, *, base_checkpoint: Path | str | None = None
    ) -> None:
        base = None if base_checkpoint is None else BaseCheckpoint(base_checkpoint)
        self.source = source_at(at, base=base) if isinstance(at, Path | str) else at
        if not hasattr(self.source, "read_range"):
            raise ConfigError(f"store {at!r}: give its directory or URL")

    def __str__(self) -> str:
        return str(self.source)

    @property
    def is_remote(self) -> bool:
        """Whether each look at it is a round trip."""
        return self.source.streams > 1

    @property
    def writer(self) -> str | None:
        """The other systems whose trainer writes this store; None for RoseMux."""
        return self.source.writer()

    def close(self) -> None:
        self.source.close()

    def latest(self) -> WeightVersion | None:
        """The newest published version; None before the first one."""
        return self._named_latest(self.source.latest())

    def newer(self, than: WeightVersion | None, *, wait_s: float) -> WeightVersion | None:
        """The newest version once it differs from `than`; None after `wait_s`."""
        known = None if than is None else latest_line(than)
        raw = self.source.latest(known, wait_s=wait_s)
        if raw != known and self._named_latest(raw) == than:
            # Others may write the line in another way.
            raw = self.source.latest(raw, wait_s=wait_s)
        found = self._named_latest(raw)
        return None if found == than else found

    def newest(self, expected: WeightVersion) -> tuple[WeightVersion | None, frozenset[VersionRef]]:
        """`latest` and `refs`; see `StoreSource.newest`."""
        try:
            raw, found = self.source.newest(latest_line(expected))
        except FileNotFoundError as error:
            raise no_store(self) from error
        return self._named_latest(raw), refs_in(found)

    def refs(self) -> frozenset[VersionRef]:
        """Every directory that has a version's name, finished or not."""
        try:
            return refs_in(self.source.directories())
        except FileNotFoundError as error:
            raise no_store(self) from error

    def manifest(self, ref: VersionRef) -> Manifest:
        """The index of one version; raises Stale if it is gone, Corrupt if it is broken."""
        try:
            raw = self.source.read_small(f"{ref.directory}/{INDEX_FILE}", MAX_INDEX_BYTES)
        except FileNotFoundError as error:
            raise Stale(f"{self}/{ref.directory} is gone or was never finished") from error
        manifest = decoded_manifest(raw, expected=ref.version)
        if manifest.section is not None and not self.source.has(f"{ref.directory}/{READY_FILE}"):
            raise self._missing(ref, f"{READY_FILE}: its publisher did not finish it")
        if ref.kind is Kind.ANCHOR and not manifest.is_full:
            raise Corrupt(f"{self}/{ref.directory} is not a full checkpoint")
        return manifest

    def stamp(self, version: WeightVersion) -> str:
        """Changes with a version that another run publishes under this number; empty if it is gone,
        and over a network, where each look is a round trip."""
        if self.is_remote:
            return ""
        with suppress(FileNotFoundError, RoseMuxError):
            return self.source.stamp(f"{VersionRef(Kind.WEIGHT, version).directory}/{INDEX_FILE}")
        return ""

    def full_checkpoints(self, refs: Iterable[VersionRef]) -> set[VersionRef]:
        """Directories that need no base; unreadable ones are skipped."""

        def is_full(ref: VersionRef) -> bool:
            try:
                return self.manifest(ref).is_full
            except RoseMuxError:
                return False

        listed = [ref for ref in refs if ref.kind is not Kind.SKIP]
        with ThreadPoolExecutor(_AT_ONCE if self.is_remote else 1) as pool:
            return {*compress(listed, pool.map(is_full, listed))}

    def size_bytes(self, ref: VersionRef, manifest: Manifest) -> int:
        """Bytes that a receiver reads to take this version."""
        if manifest.section is not None:
            return sum(record.bytes for record in manifest.section.files.values())
        return sum(self._found_bytes(ref, shard) for shard in manifest.shards)

    def layout(self, ref: VersionRef, manifest: Manifest) -> Layout:
        """Names and specs of a full version, read from its shards' headers alone."""
        merged: dict[str, TensorSpec] = {}
        for shard in manifest.shards:
            merged.update(self._shard_layout(ref, manifest, shard))
        if set(merged) != set(manifest.weight_map):
            raise Corrupt(f"{ref.directory}: shards and weight map name different tensors")
        return merged

    def small_file(self, ref: VersionRef, name: str, limit_bytes: int) -> bytes:
        """A version's file besides its shards; raises Corrupt if missing or over the limit."""
        try:
            return self.source.read_small(f"{ref.directory}/{name}", limit_bytes)
        except FileNotFoundError as error:
            raise self._missing(ref, name) from error

    def shard(
        self, ref: VersionRef, manifest: Manifest, shard: str, spool: Spool, *, lent_bytes: int
    ) -> ShardCopy:
        """A copy of a shard, not fetched yet; reads take up to `lent_bytes`. Raises Corrupt."""
        size = self._checked_bytes(ref, manifest, shard)
        record = manifest.section.files[shard] if manifest.section else None
        source = self.source
        piece_bytes = min(source.range_bytes, max(_PIECE_BYTES, lent_bytes // source.streams))
        path = f"{ref.directory}/{shard}"
        return ShardCopy(
            source,
            path,
            record,
            spool.stage(size),
            piece_bytes=piece_bytes,
            missing=lambda: self._missing(ref, shard),
        )

    def doubt(self, ref: VersionRef, manifest: Manifest) -> None:
        """Report that some shard's bytes were wrong, so that no cached copy of them is used."""
        for shard in manifest.shards:
            self.source.doubt(f"{ref.directory}/{shard}")

    def _named_latest(self, raw: bytes | None) -> WeightVersion | None:
        if raw is None:
            return None
        ref = named_ref(raw.decode("ascii", errors="replace").strip())
        if ref is None or ref.kind is not Kind.WEIGHT:
            raise Corrupt(f"{self}/{LATEST_FILE} holds {raw!r}")
        return ref.version

    def _missing(self, ref: VersionRef, what: str) -> RoseMuxError:
        """The error for a missing file. A pruned version loses its index before any other file."""
        if not self.source.has(f"{ref.directory}/{INDEX_FILE}"):
            return Stale(f"{self}/{ref.directory} was pruned while it was read: take a newer one")
        return Corrupt(f"{self}/{ref.directory} has no {what}")

    def _shard_layout(self, ref: VersionRef, manifest: Manifest, shard: str) -> Layout:
        path, size = f"{ref.directory}/{shard}", self._checked_bytes(ref, manifest, shard)
        try:
            head = self.source.bytes_at(path, 0, min(size, _HEAD_BYTES))

            def read(start: int, stop: int) -> bytearray:
                if stop <= len(head):
                    return head[start:stop]
                return self.source.bytes_at(path, start, stop - start)

            return read_header(read, file_bytes=size, what=f"{self}/{path}").layout
        except FileNotFoundError as error:
            raise self._missing(ref, shard) from error
        except Corrupt:
            self.source.doubt(path)
            raise

    def _found_bytes(self, ref: VersionRef, shard: str) -> int:
        try:
            return self.source.size_bytes(f"{ref.directory}/{shard}")
        except FileNotFoundError as error:
            raise self._missing(ref, shard) from error

    def _checked_bytes(self, ref: VersionRef, manifest: Manifest, shard: str) -> int:
        """The size of a shard; raises Corrupt if another one was published."""
        path, found = f"{ref.directory}/{shard}", self._found_bytes(ref, shard)
        published = manifest.section.files[shard].bytes if manifest.section else found
        if found != published:
            self.source.doubt(path)
            raise Corrupt(f"{self}/{path}: {found} bytes where {published} were published")
        if found > MAX_SHARD_BYTES:
            raise Corrupt(f"{self}/{path}: {found} bytes is over the limit of {MAX_SHARD_BYTES}")
        return found
