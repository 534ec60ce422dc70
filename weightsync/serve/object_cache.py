"""A relay's copies on disk: whole ones under their key, growing ones beside them until verified.

    <root>/<store>/<key>          whole, and its digest matched at the last check
    <root>/<store>/<key>.part     growing; discarded after a restart

A kill or a power cut leaves either a `.part`, which is deleted at the next start, or a file that is
verified once before it is served.
"""

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.ids import is_name
from harvester.platform.file_lock import locked
from weightsync.reading.chunks import ChunkMap
from weightsync.serve.metrics import TransferMetrics

_PART = ".part"
_PROVABLE = re.compile(r"[0-9a-f]{32}-[0-9]{1,18}\Z", re.ASCII)
_UNPROVABLE = re.compile(r"[0-9a-f]{32}-([0-9]{1,18}\.part|foreign(\.part)?)\Z", re.ASCII)
_LOCK_FILE = ".relay-lock"
_HASH_BYTES = 4 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(slots=True)
class CachedObject:
    """One file of the cache, growing or whole."""

    path: Path
    """Path of the file once it is whole."""
    size_bytes: int
    chunks: ChunkMap | None
    """Present chunks of a growing file; None for a whole one."""
    proved: bool = False
    """Whether its digest was verified since this process began."""
    users: int = 0
    used_at: int = 0
    """Number of its last use: larger is later."""
    handle: int | None = field(default=None, repr=False)
    """File descriptor; open while it is in use."""

    @property
    def is_whole(self) -> bool:
        return self.chunks is None

    @property
    def part(self) -> Path:
        return self.path.with_name(self.path.name + _PART)

    @property
    def now_at(self) -> Path:
        return self.path if self.is_whole else self.part


def evicted(
    held: Iterable[CachedObject], *, capacity_bytes: int
) -> tuple[CachedObject, ...] | None:
    """The least recently used to drop, so that the rest fits; None if used ones are too many."""
    ordered = sorted(held, key=lambda one: (one.used_at, one.path))
    over = sum(one.size_bytes for one in ordered) - capacity_bytes
    doomed = []
    for one in ordered:
        if over > 0 and not one.users:
            doomed.append(one)
            over -= one.size_bytes
    return tuple(doomed) if over <= 0 else None


class ObjectCache:
    """Bounded by `capacity_bytes`; one process per directory. Not thread-safe."""

    def __init__(
        self, root: Path, capacity_bytes: int, *, metrics: TransferMetrics | None = None
    ) -> None:
        self.root = root
        self._capacity_bytes = capacity_bytes
        self._metrics = metrics or TransferMetrics()
        self._objects: dict[str, CachedObject] = {}
        self._uses = 0
        try:
            root.mkdir(parents=True, exist_ok=True)
            if any(root.iterdir()) and not (root / _LOCK_FILE).exists():
                raise ConfigError(
                    f"{root} has files and is no relay's cache: name an empty directory (--cache)"
                )
            taken = f"{root} has a relay already: give this one another cache"
            self._lock = locked(root / _LOCK_FILE, taken=taken)
        except OSError as error:
            raise ConfigError(f"cannot use {root} as a cache: {error.strerror}") from error
        self._load()
        self._make_room(0)

    def close(self) -> None:
        for held in self._objects.values():
            self._shut(held)
        self._lock.close()

    def holds(self, store: str, key: str) -> bool:
        """Whether the whole file is present; one of an earlier process is not verified yet."""
        held = self._objects.get(f"{store}/{key}")
        return held is not None and held.is_whole

    def take(self, store: str, key: str, size_bytes: int) -> CachedObject:
        """The object, in use until `leave`; a new one is empty, with its disk space reserved.

        Raises Exhausted if everything else is in use, or the disk is full without idle copies too;
        ConfigError if it is larger than the cache.
        """
        name = f"{store}/{key}"
        held = self._objects.get(name)
        if held is not None and held.handle is None and not held.now_at.exists():
            # The file was deleted behind the relay's back.
            self.drop(held, reason="missing")
            held = None
        if held is None:
            held = self._objects[name] = self._created(store, key, size_bytes)
        if held.handle is None:
            held.handle = os.open(held.now_at, os.O_RDONLY)
        self._uses += 1
        held.users, held.used_at = held.users + 1, self._uses
        return held

    def leave(self, held: CachedObject) -> None:
        held.users -= 1
        if held.users == 0:
            self._shut(held)

    def settle(self, held: CachedObject) -> None:
        """Record that a growing object is whole and verified."""
        held.part.rename(held.path)
        held.chunks, held.proved = None, True

    def drop(self, held: CachedObject, *, reason: str) -> None:
        """Remove an object from the cache; readers that have it open may finish."""
        name = f"{held.path.parent.name}/{held.path.name}"
        if self._objects.get(name) is held:
            del self._objects[name]
        held.now_at.unlink(missing_ok=True)
        self._metrics.dropped.labels(reason).inc()
        self._count()

    def _created(self, store: str, key: str, size_bytes: int) -> CachedObject:
        if size_bytes > self._capacity_bytes:
            raise ConfigError(
                f"{size_bytes} bytes do not fit a cache of {self._capacity_bytes}: start the "
                "relay with a larger --cache-bytes"
            )
        self._make_room(size_bytes)
        held = CachedObject(self.root / store / key, size_bytes, ChunkMap(size_bytes))
        left_bytes = size_bytes
        while True:
            try:
                _reserve(held.part, size_bytes)
                break
            except OSError as error:
                held.part.unlink(missing_ok=True)
                idle = [one for one in self._objects.values() if not one.users]
                if error.errno not in _FULL or not idle or left_bytes <= 0:
                    raise Exhausted(f"no room in {self.root}: {error.strerror}") from error
                # The disk is smaller than the capacity, or has other files too.
                oldest = min(idle, key=lambda one: one.used_at)
                left_bytes -= oldest.size_bytes
                self.drop(oldest, reason="evicted")
        self._metrics.cached.inc(size_bytes)
        return held

    def _make_room(self, needed_bytes: int) -> None:
        left_bytes = self._capacity_bytes - needed_bytes
        doomed = evicted(self._objects.values(), capacity_bytes=left_bytes)
        if doomed is None:
            raise Exhausted(f"every file in the cache {self.root} is in use")
        for held in doomed:
            self.drop(held, reason="evicted")

    def _load(self) -> None:
        """Keep whole files of an earlier process whose name has a digest; delete its others."""
        stores = (path for path in self.root.glob("*/*") if is_name(path.parent.name))
        found = [path for path in stores if path.is_file()]
        kept = [path for path in found if _PROVABLE.match(path.name)]
        for path in found:
            if _UNPROVABLE.match(path.name):
                path.unlink()
        for path in sorted(kept, key=lambda path: path.stat().st_mtime_ns):
            self._uses += 1
            self._objects[f"{path.parent.name}/{path.name}"] = CachedObject(
                path, path.stat().st_size, None, used_at=self._uses
            )
        self._count()

    def _count(self) -> None:
        self._metrics.cached.set(sum(held.size_bytes for held in self._objects.values()))

    def _shut(self, held: CachedObject) -> None:
        if held.handle is not None:
            os.close(held.handle)
            held.handle = None


def _reserve(part: Path, size_bytes: int) -> None:
    part.parent.mkdir(exist_ok=True)
    handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        if size_bytes:
            os.posix_fallocate(handle, 0, size_bytes)
    finally:
        os.close(handle)


def digest_on_disk(handle: int, size_bytes: int) -> str:
    """xxh3-128 of an open file."""
    whole = xxhash.xxh3_128()
    for at in range(0, size_bytes, _HASH_BYTES):
        whole.update(os.pread(handle, min(_HASH_BYTES, size_bytes - at), at))
    return str(whole.hexdigest())
