"""Skip deltas: several versions as one delta, for receivers that have fallen behind.

Made of the deltas that the store has, in a thread beside the training step, and written by the next
publish or by `close`, which waits a while. A store without them is as complete, so that a failure
costs only their absence. Rank 0 makes them for all ranks.
"""

import logging
from contextlib import closing, suppress
from queue import SimpleQueue
from threading import Event, Thread

from harvester.contracts.errors import Exhausted, RoseMuxError, Stale, Unsupported
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Layout
from weightsync.layout.names import Kind, VersionRef
from weightsync.publish.composing import SkipDelta, SpoolDraft, composed_skip
from weightsync.publish.settings import WorkSettings
from weightsync.publish.store_writer import WritableStore
from weightsync.publish.version_writer import StoreFull, VersionWriter
from weightsync.reading.store import Store
from weightsync.transport.ranges import ByteSpan

_LOG = logging.getLogger(__name__)
_SPANS = (4, 8)
"""Versions that a skip delta covers; at every version that the longest divides another goes back to
the full checkpoint."""
_WAITING = 3
CLOSE_S = 10.0


def due_bases(version: WeightVersion, *, full: WeightVersion) -> tuple[WeightVersion, ...]:
    """The bases of the skip deltas to make once `version` is published, the newest first.

    Counted from the full checkpoint, 0 if none leads to the version: four versions back at every
    fourth, eight back and back to that checkpoint at every eighth.
    """
    since = version - full if full else 0
    spans = {span for span in _SPANS if since > 0 and since % span == 0}
    if max(_SPANS) in spans:
        spans.add(since)
    return tuple(WeightVersion(version - span) for span in sorted(spans))


class SkipDeltaWriter:
    """Belongs to the thread that publishes; `spool_dir` of `work` holds what is too large for the
    memory: deltas while they are read, and skip deltas until they are written."""

    def __init__(self, store: WritableStore, lead: VersionWriter, work: WorkSettings) -> None:
        self._store = store
        self._lead = lead
        self._maker = _Maker(store.reader(), work)
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
                is_answering = isinstance(error, StoreFull | Stale)
                _log_left_out(error)
                with suppress(RoseMuxError, OSError):
                    self._lead.writer.sweep()

    def _write(self, skip: SkipDelta) -> None:
        size_bytes = sum(file.size_bytes for file in skip.files.values())
        begun = self._lead.begin_skip(skip.ref, size_bytes=size_bytes)
        with closing(self._store.draft(begun)) as draft:
            for name, file in skip.files.items():
                draft.write(name, file.pieces(ByteSpan(0, file.size_bytes)))
            draft.settle()
        self._lead.commit_skip(begun, skip)


class _Maker:
    """Composes the skip deltas put into `due` in a separate thread, until None is put."""

    def __init__(self, reader: Store, work: WorkSettings) -> None:
        self.reader = reader
        self._work = work
        self.due: SimpleQueue[tuple[WeightVersion, WeightVersion, Layout] | None] = SimpleQueue()
        self.made: SimpleQueue[SkipDelta] = SimpleQueue()
        self.is_closed = Event()

    def run(self) -> None:
        while (due := self.due.get()) is not None:
            self._make(*due)

    def _make(self, base: WeightVersion, version: WeightVersion, layout: Layout) -> None:
        ref, draft = VersionRef(Kind.SKIP, version, base), SpoolDraft(self._work.spool_dir)
        size, until = self._work.shard_bytes, self.is_closed
        try:
            skip = composed_skip(self.reader, ref, layout, draft, shard_bytes=size, until=until)
            self.made.put(skip)
        except Exception as error:
            _log_left_out(error)


def _log_left_out(error: Exception) -> None:
    level = logging.INFO if isinstance(error, Exhausted | Unsupported) else logging.WARNING
    _LOG.log(level, "a skip delta is left out: %s", error)
