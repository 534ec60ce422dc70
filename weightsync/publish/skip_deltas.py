"""Skip deltas: several versions as one delta, for receivers that have fallen behind.

Made of the deltas that the store has, in a thread beside the training step, and written by the next
publish or by `close`, which waits a while. A store without them is as complete, so that a failure
costs only their absence. Rank 0 makes them for all ranks.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from harvester.contracts.errors import Corrupt, Exhausted, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Layout
from weightsync.encoding.codec import Encoded, Encoding, composed
from weightsync.layout.manifest import Block, Manifest
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
"""Size of the deltas that one skip delta is made of, over the model's: it waits in memory."""
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
    block: Block
    """Of the version that it leads to."""
    entries: Mapping[str, Encoded]


class SkipDeltas:
    """Belongs to the thread that publishes; `spool_dir` holds deltas that are too large for the
    memory while they are read."""

    def __init__(
        self, store: WritableStore, lead: VersionWriter, *, shard_bytes: int, spool_dir: Path | None
    ) -> None:
        self._store = store
        self._reader = store.reader()
        self._lead = lead
        self._shard_bytes = shard_bytes
        self._spool_dir = spool_dir
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-skip")
        self._is_closed = Event()
        self._waiting: deque[Future[SkipDelta]] = deque()

    def published(self, version: WeightVersion) -> None:
        """Write those that are finished, and begin those that `version` makes due."""
        while self._waiting and self._waiting[0].done():
            self._write(self._waiting.popleft().result)
        full, layout = self._lead.newest_full, self._lead.layout
        for base in due_bases(version, full=full):
            if len(self._waiting) < _WAITING:
                self._waiting.append(self._pool.submit(self._made, base, version, layout))

    def close(self) -> None:
        """Write the remaining ones that are finished within CLOSE_S."""
        wait(self._waiting, CLOSE_S)
        self._is_closed.set()
        while self._waiting:
            self._write(self._waiting.popleft().result)
        self._pool.shutdown()
        self._reader.close()

    def _made(self, base: WeightVersion, version: WeightVersion, layout: Layout) -> SkipDelta:
        spool = Spool(MemoryRoom(_ROOM_BYTES), self._spool_dir)
        return made(self._reader, base, version, layout, spool, until=self._is_closed)

    def _write(self, finished: Callable[[], SkipDelta]) -> None:
        try:
            skip = finished()
            size_bytes = sum(len(encoded.payload) for encoded in skip.entries.values())
            begun = self._lead.begin_skip(skip.ref, size_bytes=size_bytes)
            with closing(self._store.draft(begun)) as draft:
                files = ShardFiles(draft, rank=0, limit_bytes=self._shard_bytes, may_pack=True)
                for entry, encoded in skip.entries.items():
                    files.add(entry, encoded)
                written = WrittenShare(files.finish(), {})
            self._lead.commit_skip(begun, skip.ref, skip.block, written)
        except (RoseMuxError, MemoryError) as error:
            level = logging.INFO if isinstance(error, Exhausted) else logging.WARNING
            _LOG.log(level, "a skip delta is left out: %s", error)
            self._lead.sweep()


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
    block = chain[-1][1].block
    if block is None:
        raise Corrupt(f"{ref.directory}: version {version} is of another system")
    size_bytes = sum(store.size_bytes(each, manifest) for each, manifest in chain)
    payloads = sum(len(manifest.weight_map) for _, manifest in chain)
    limit_bytes = max(_SMALL_BYTES, _MOST_OF_DENSE * block.bytes_dense)
    if size_bytes > limit_bytes or payloads > _MAX_PAYLOADS:
        raise Exhausted(f"{ref.directory}: {payloads} payloads of {size_bytes} bytes are too many")
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
    return SkipDelta(ref=ref, block=block, entries=entries)


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
    while at is not None and at > base:
        ref = VersionRef(Kind.WEIGHT, at)
        manifest = store.manifest(ref)
        chain.append((ref, manifest))
        at = manifest.base_version
    if at != base:
        raise Stale(f"the deltas of version {version} do not lead back to version {base}")
    return chain[::-1]
