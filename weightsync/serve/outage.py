"""Replies of a relay while upstream is away: cached LATEST files and indexes, one file each.

    <cache>/.remembered/<store>/LATEST
    <cache>/.remembered/<store>/<version>      its index

Served only for versions whose shards are all cached.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from harvester.contracts.errors import Corrupt, Exhausted
from harvester.contracts.ids import is_name
from harvester.platform.whole_file import TEMPORARY
from weightsync.layout.durable import read_plain
from weightsync.layout.names import LATEST_FILE, MAX_INDEX_BYTES, VersionRef, named_ref
from weightsync.serve.published import PublishedFile, published_files

T = TypeVar("T")

PATIENCE_S = 5.0
"""Seconds to wait for a reply that a cached one could replace."""
_PROBE_EVERY_S = 1.0
_DIRECTORY = ".remembered"
MAX_VERSIONS = 256
"""Indexes per store; the oldest are dropped."""


class UpstreamOutage:
    """Begins when a request stays open for too long, ends when a probe is answered; meanwhile no
    reader waits for upstream. Belongs to one event loop."""

    def __init__(self) -> None:
        self._probing: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        return self._probing is not None and not self._probing.done()

    async def request(
        self,
        ask: Callable[[], Awaitable[T]],
        recall: Callable[[], T | None],
        probe: Callable[[], Awaitable[object]] | None = None,
        *,
        wait_s: float = 0.0,
    ) -> T:
        """The result of `ask`, or of `recall` if `ask` takes longer than `wait_s` plus PATIENCE_S.
        Without a cached reply, waits for `ask`. `probe` asks whether upstream is back."""
        if self.is_on and (held := recall()) is not None:
            return held
        asking = asyncio.ensure_future(ask())
        # Fetches the exception: asyncio would log it if all readers have left before the failure.
        asking.add_done_callback(lambda asking: asking.cancelled() or asking.exception())
        done, _ = await asyncio.wait({asking}, timeout=wait_s + PATIENCE_S)
        if not done or isinstance(asking.exception(), Exhausted):
            held = recall()
            if held is not None:
                self._begin(probe or ask)
                return held
        return await asking

    async def over(self, timeout_s: float) -> bool:
        """Wait for the end of the outage; returns whether it ended in time."""
        if self._probing is not None and self.is_on:
            await asyncio.wait({self._probing}, timeout=timeout_s)
        return not self.is_on

    def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()

    def _begin(self, probe: Callable[[], Awaitable[object]]) -> None:
        if not self.is_on:
            self._probing = asyncio.create_task(_until_answered(probe))


async def _until_answered(probe: Callable[[], Awaitable[object]]) -> None:
    while True:
        await asyncio.sleep(_PROBE_EVERY_S)
        try:
            await probe()
        except Exhausted:
            continue
        except Exception:
            # Any other answer shows that upstream is reachable.
            return
        return


class CachedReplies:
    """Cached replies by names that the callers have checked. Not thread-safe."""

    def __init__(self, cache: Path) -> None:
        self._root = cache / _DIRECTORY
        self._latest: dict[str, bytes] = {}
        self._files: dict[tuple[str, str], tuple[bytes, Mapping[str, PublishedFile]]] = {}
        for path in self._root.glob("*/*"):
            if is_name(path.parent.name):
                self._take(path.parent.name, path)

    def stores(self) -> tuple[str, ...]:
        return tuple(sorted({*self._latest}))

    def latest(self, store: str) -> VersionRef | None:
        return named_ref(self._latest.get(store, b"").decode("ascii", "replace").strip())

    def index(self, store: str, version: str) -> bytes | None:
        held = self._files.get((store, version))
        return None if held is None else held[0]

    def files(self, store: str) -> Mapping[str, Mapping[str, PublishedFile]]:
        """The shards of each version whose index is cached."""
        return {v: files for (of, v), (_, files) in self._files.items() if of == store}

    def keep_latest(self, store: str, raw: bytes) -> None:
        if self._latest.get(store) != raw:
            self._latest[store] = raw
            self._write(store, LATEST_FILE, raw)

    def keep_index(
        self, store: str, version: str, raw: bytes, files: Mapping[str, PublishedFile]
    ) -> None:
        """`files`: files named by the index."""
        self._files[store, version] = (raw, files)
        self._write(store, version, raw)
        here = sorted((v for of, v in self._files if of == store), key=_age)
        for old in here[:-MAX_VERSIONS]:
            del self._files[store, old]
            (self._root / store / old).unlink(missing_ok=True)

    def _write(self, store: str, name: str, raw: bytes) -> None:
        # Without the file a restarted relay has fewer replies; nothing else is lost.
        with suppress(OSError):
            (self._root / store).mkdir(parents=True, exist_ok=True)
            temporary = self._root / store / f"{TEMPORARY}{name}"
            # A power cut may tear it: an unreadable file is ignored at the next start.
            temporary.write_bytes(raw)
            temporary.replace(self._root / store / name)

    def _take(self, store: str, path: Path) -> None:
        with suppress(OSError, Corrupt):
            raw = read_plain(path, MAX_INDEX_BYTES)
            if path.name == LATEST_FILE:
                self._latest[store] = raw
            elif named_ref(path.name) is not None:
                self._files[store, path.name] = (raw, published_files(raw))


def _age(version: str) -> int:
    ref = named_ref(version)
    return 0 if ref is None else ref.version
