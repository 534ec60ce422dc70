"""Skip deltas that a server composes for a reader, and keeps for those at the same version.

A receiver that is behind asks for one from the version it holds, whichever that is. No store has
so many, and a relay does not compose: its readers share what crosses its link.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, TypeAlias

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import Unsupported
from weightsync.layout.names import INDEX_FILE, MAX_INDEX_BYTES, Kind, VersionRef
from weightsync.serve.metrics import TransferMetrics
from weightsync.transport.source import StoreSource
from weightsync.transport.wire import index_etag

if TYPE_CHECKING:
    from weightsync.reading.spool import StagedFile

Files: TypeAlias = Mapping[str, "StagedFile"]
Compose: TypeAlias = Callable[[StoreSource, VersionRef, Event], Files]
"""The files of a skip delta by name; raises if it has none, also once the event is set."""
_LOG = logging.getLogger(__name__)
_WAITING = 4
"""Shared by the stores that wait: one store's many readers refuse no other store's."""
_WAIT_S = 15.0
"""Shorter than a reader's patience with a silent server (20 s)."""
_FAILED_S = 60.0
_MAX_FAILED = 256


@dataclass(slots=True)
class _Composed:
    tag: str
    """Entity tag of the last version's index: a delta to another run's version is not reused."""
    files: "asyncio.Future[Files]"
    size_bytes: int = 0
    """0 while it is in the making."""


class ComposedVersions:
    """Keeps up to `kept_bytes`, the most recently used. Belongs to one event loop."""

    def __init__(
        self,
        compose: Compose,
        *,
        kept_bytes: int,
        metrics: TransferMetrics | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._compose = compose
        self._clock = clock or MonotonicClock()
        self._metrics = metrics or TransferMetrics()
        self._kept_bytes = kept_bytes
        self._kept: dict[tuple[str, VersionRef], _Composed] = {}
        self._failed: dict[tuple[str, VersionRef], tuple[str, float]] = {}
        """Tag of each that failed, and when: most would fail again, at the same cost."""
        self._unsupported: dict[str, float] = {}
        """When a store was last found to have deltas that do not add up."""
        self._closed = Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-compose")

    def close(self) -> None:
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def composes(self, store: str) -> bool:
        """False for a while after the store's deltas were found not to add up."""
        return self._clock.now() >= self._unsupported.get(store, -_FAILED_S) + _FAILED_S

    async def file(
        self, store: str, source: StoreSource, ref: VersionRef, name: str, *, doubted: bool
    ) -> "StagedFile":
        """Raises FileNotFoundError if there is none, and none can be composed in time."""
        key = store, ref
        if doubted:
            self._kept.pop(key, None)
        if name == INDEX_FILE or key not in self._kept:
            tag = await asyncio.to_thread(_tag, source, ref)
            if key not in self._kept or self._kept[key].tag != tag:
                self._kept[key] = self._begun(key, source, tag)
        composed = self._kept[key] = self._kept.pop(key)
        done, _ = await asyncio.wait({composed.files}, timeout=_WAIT_S)
        if not done:
            raise FileNotFoundError(f"{ref.directory} is being composed")
        try:
            return composed.files.result()[name]
        except (Exception, asyncio.CancelledError) as error:
            raise FileNotFoundError(f"{ref.directory}/{name} is not composed: {error}") from error

    def _begun(self, key: tuple[str, VersionRef], source: StoreSource, tag: str) -> _Composed:
        ref = key[1]
        failed_tag, failed_s = self._failed.get(key, ("", 0.0))
        if failed_tag == tag and self._clock.now() < failed_s + _FAILED_S:
            raise FileNotFoundError(f"{ref.directory} could not be composed")
        waiting = Counter(store for (store, _), e in self._kept.items() if not e.files.done())
        share = max(1, _WAITING // len(waiting.keys() | {key[0]}))
        if waiting.total() >= _WAITING and waiting[key[0]] >= share:
            raise FileNotFoundError(f"{ref.directory}: {waiting.total()} others are being composed")
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._thread, self._compose, source, ref, self._closed)
        composed = _Composed(tag, work)
        work.add_done_callback(lambda done: self._ended(key, composed, done))
        return composed

    def _ended(
        self, key: tuple[str, VersionRef], composed: _Composed, done: "asyncio.Future[Files]"
    ) -> None:
        error = "the server is closed" if done.cancelled() else done.exception()
        self._metrics.composed.labels(key[0], "failed" if error else "done").inc()
        if error:
            if self._kept.get(key) is composed:
                del self._kept[key]
            if isinstance(error, Unsupported):
                self._unsupported[key[0]] = self._clock.now()
            self._failed.pop(key, None)
            self._failed[key] = composed.tag, self._clock.now()
            if len(self._failed) > _MAX_FAILED:
                del self._failed[next(iter(self._failed))]
            _LOG.info("%s/%s is not composed: %s", key[0], key[1].directory, error)
            return
        composed.size_bytes = sum(file.size_bytes for file in done.result().values())
        over_bytes = sum(each.size_bytes for each in self._kept.values()) - self._kept_bytes
        # The one just made stays in any case: its readers ask for its files one by one.
        others = [k for k, each in self._kept.items() if each is not composed and each.size_bytes]
        for oldest in others:
            if over_bytes > 0:
                over_bytes -= self._kept.pop(oldest).size_bytes


def _tag(source: StoreSource, ref: VersionRef) -> str:
    leads_to = VersionRef(Kind.WEIGHT, ref.version)
    return index_etag(source.read_small(f"{leads_to.directory}/{INDEX_FILE}", MAX_INDEX_BYTES))
