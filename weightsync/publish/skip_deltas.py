"""Skip deltas: several versions as one delta, for receivers that have fallen behind.

Made of the deltas that the store has, in a thread beside the training step, and written by the next
publish or by `close`, which waits a while. A store without them is as complete, so that a failure
costs only their absence. Rank 0 makes them for all ranks.
"""

import logging
import math
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from harvester.contracts.errors import Corrupt, Exhausted, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Layout
from weightsync.encoding.codec import Encoded, Encoding, composed
from weightsync.layout.manifest import IndexSection, Manifest
from weightsync.layout.names import Kind, VersionRef
from weightsync.publish.agreement import WrittenShare
from weightsync.publish.delta_shards import ShardFiles
from weightsync.publish.store_writer import WritableStore
from weightsync.publish.version_writer import VersionWriter
from weightsync.reading.memory_room import MemoryRoom
from weightsync.reading.spool import Spool, StagedFile
from weightsync.reading.store import Store
from weightsync.transport.ranges import ByteSpan

_LOG = logging.getLogger(__name__)
_SPANS = (4, 8)
"""Versions that a skip delta covers; at every version that the longest divides another goes back to
the full checkpoint."""
_MOST_OF_DENSE = 0.5
"""Size of the deltas that one skip delta is made of, over the model's: they wait in a file."""
_SMALL_BYTES = 64 << 20
_MAX_PAYLOADS = 1 << 19
"""Each takes some 50 us of the interpreter, which the trainer shares."""
_ROOM_BYTES = 64 << 20
_WAITING = 3
CLOSE_S = 10.0


def due_bases(version: WeightVersion, *, full: WeightVersion) -> tuple[WeightVersion, ...]:
    """The bases of the skip deltas to make once `version` is published, the newest first.

    Counted from the full checkpoint: four versions back at every fourth, eight back and back to
    that checkpoint at every eighth.
    """
    since = version - full
    spans = {span for span in _SPANS if since > 0 and since % span == 0}
    if max(_SPANS) in spans:
        spans.add(since)
    return tuple(WeightVersion(version - span) for span in sorted(spans))


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipDelta:
    ref: VersionRef
    section: IndexSection
    """The section of the version that it leads to."""
    entries: Mapping[str, Encoded]


class SkipDeltaWriter:
    """Belongs to the thread that publishes; `spool_dir` holds deltas that are too large for the
    memory while they are read."""

    def __init__(
        self, store: WritableStore, lead: VersionWriter, *, shard_bytes: int, spool_dir: Path | None
    ) -> None:
        self._store = store
        self._lead = lead
        self._shard_bytes = shard_bytes
        self._maker = _Maker(store.reader(), spool_dir)
        # A daemon thread, so that no trainer's exit waits for it. It holds no lock on the store.
        self._thread = Thread(target=self._maker.run, name="weight-skip", daemon=True)

    def published(self, version: WeightVersion) -> None:
        """Write finished skip deltas, and queue the skip deltas that `version` makes due."""
        self._write_all()
        for base in due_bases(version, full=self._lead.newest_full):
            if self._maker.due.qsize() < _WAITING:
                self._maker.due.put((base, version, self._lead.layout))
        if not (self._maker.due.empty() or self._thread.is_alive()):
            with suppress(RuntimeError):
                self._thread.start()

    def close(self) -> None:
        """Write the remaining ones that are made within CLOSE_S."""
        try:
            if self._thread.is_alive():
                self._maker.due.put(None)
                self._thread.join(CLOSE_S)
        finally:
            self._maker.is_closed.set()
        self._write_all()
        self._maker.reader.close()

    def _write_all(self) -> None:
        """Write the finished ones; if the store fails, the others are left out too, for each would
        wait for it."""
        is_answering = True
        while not self._maker.made.empty():
            skip = self._maker.made.get()
            try:
                if is_answering:
                    self._write(skip)
            except Exception as error:
                is_answering = isinstance(error, Exhausted | Stale)
                _log_left_out(error)
                with suppress(RoseMuxError, OSError):
                    self._lead.sweep()

    def _write(self, skip: SkipDelta) -> None:
        payload_bytes = sum(len(encoded.payload) for encoded in skip.entries.values())
        begun = self._lead.begin_skip(skip.ref, payload_bytes=payload_bytes)
        with closing(self._store.draft(begun)) as draft:
            files = ShardFiles(draft, rank=0, limit_bytes=self._shard_bytes, may_pack=True)
            for entry, encoded in skip.entries.items():
                files.add(entry, encoded)
            written = WrittenShare(files.finish(), {})
        self._lead.commit_skip(begun, skip.ref, skip.section, written)


class _Maker:
    """Composes the skip deltas put into `due` in a separate thread, until None is put."""

    def __init__(self, reader: Store, spool_dir: Path | None) -> None:
        self.reader = reader
        self.due: SimpleQueue[tuple[WeightVersion, WeightVersion, Layout] | None] = SimpleQueue()
        self.made: SimpleQueue[SkipDelta] = SimpleQueue()
        self.is_closed = Event()
        self._spool_dir = spool_dir

    def run(self) -> None:
        while (due := self.due.get()) is not None:
            self._make(*due)

    def _make(self, base: WeightVersion, version: WeightVersion, layout: Layout) -> None:
        spool = Spool(MemoryRoom(_ROOM_BYTES), self._spool_dir)
        try:
            self.made.put(made(self.reader, base, version, layout, spool, until=self.is_closed))
        except Exception as error:
            _log_left_out(error)


def _log_left_out(error: Exception) -> None:
    level = logging.INFO if isinstance(error, Exhausted) else logging.WARNING
    _LOG.log(level, "a skip delta is left out: %s", error)


def made(
    store: Store,
    base: WeightVersion,
    version: WeightVersion,
    layout: Layout,
    spool: Spool,
    *,
    until: Event,
) -> SkipDelta:
    """Compose the deltas from `base` to `version`; `layout` is of the versions' entries.

    Raises Exhausted if they are too large or the event is set, Stale if they do not lead from the
    one to the other, and Corrupt.
    """
    ref = VersionRef(Kind.SKIP, version, base)
    chain = _chain(store, base, version)
    section = chain[-1][1].section
    if section is None:
        raise Corrupt(f"{ref.directory}: version {version} was written by another system")
    changes, digests = _payloads(store, chain, spool, until)
    entries = {}
    for entry, steps in changes.items():
        _check_open(until)
        found = composed(
            ((encoding, file.read(span).data) for encoding, file, span in steps),
            layout[entry],
            digests[entry],
        )
        if found is not None:
            entries[entry] = found
    return SkipDelta(ref=ref, section=section, entries=entries)


def _payloads(
    store: Store, chain: list[tuple[VersionRef, Manifest]], spool: Spool, until: Event
) -> tuple[dict[str, list[tuple[Encoding, StagedFile, ByteSpan]]], dict[str, str]]:
    """Per entry: where its payloads are, in the chain's order, and the last digest."""
    changes: dict[str, list[tuple[Encoding, StagedFile, ByteSpan]]] = {}
    digests: dict[str, str] = {}
    for ref, manifest in chain:
        for shard in manifest.shards:
            _check_open(until)
            copy = store.shard(ref, manifest, shard, spool, lent_bytes=_ROOM_BYTES)
            copy.fetch()
            header = copy.header()
            digests |= header.metadata
            for entry in header.layout:
                span = ByteSpan(*header.offsets[entry])
                change = (manifest.encoding_of(entry), copy.staged, span)
                changes.setdefault(entry, []).append(change)
    return changes, digests


def _check_open(until: Event) -> None:
    if until.is_set():
        raise Exhausted("the publisher was closed before it was finished")


def _chain(
    store: Store, base: WeightVersion, version: WeightVersion
) -> list[tuple[VersionRef, Manifest]]:
    chain: list[tuple[VersionRef, Manifest]] = []
    at: WeightVersion | None = version
    left_bytes, left_payloads = math.inf, _MAX_PAYLOADS
    while at is not None and at > base:
        ref = VersionRef(Kind.WEIGHT, at)
        manifest = store.manifest(ref)
        if not chain and manifest.section is not None:
            left_bytes = max(_SMALL_BYTES, _MOST_OF_DENSE * manifest.section.bytes_dense)
        chain.append((ref, manifest))
        left_bytes -= store.size_bytes(ref, manifest)
        left_payloads -= len(manifest.weight_map)
        if left_bytes < 0 or left_payloads < 0:
            raise Exhausted(f"the deltas from version {at} to {version} are too large")
        at = manifest.base_version
    if at != base:
        raise Stale(f"the deltas of version {version} do not lead back to version {base}")
    return chain[::-1]
