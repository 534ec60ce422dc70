"""Writes a store into an object store, which has neither a lock nor a rename.

    <version>/<attempt>-<file>    shards, under names that no index mentions yet; then READY
    <version>/<index>             created, never replaced: from here on it is a version; then LATEST
    .publisher                    the publisher that began last

The newest publisher takes a store over: it writes `.publisher` before it looks for leftovers, and
every publisher reads that file before an index and before and after LATEST. So of two concurrent
publishers the older one stops, a version with an index is never swept when LATEST comes to name it,
and one that stalled does not leave LATEST behind. Listings may lag: an attempt counts as unfinished
only after its index was requested by name.

A delta's payloads go to a nameless file of this machine first. From there they are uploaded, and
again where that fails, while the next ones are encoded; and from there the publisher's copy moves
once the version is out. A full checkpoint is uploaded straight from the copy.
"""

import logging
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import IO, Any

import numpy as np

from harvester.contracts.errors import ConfigError, Corrupt, PeerProtocolError, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion, checked_name
from harvester.platform.backoff import RetryLimits
from weightsync.elements.bits import Bytes
from weightsync.layout.adapter import FULL_SHARD_FILE
from weightsync.layout.durable import refusals
from weightsync.layout.names import (
    CONFIG_FILE,
    INDEX_FILE,
    LATEST_FILE,
    READY_FILE,
    Kind,
    VersionRef,
    latest_line,
    named_ref,
)
from weightsync.publish.agreement import Shard
from weightsync.publish.store_writer import StoreWriter
from weightsync.reading.store import Store
from weightsync.transport.objects import ObjectStore

_LOG = logging.getLogger(__name__)

OWNER_FILE = ".publisher"
_OURS = re.compile(r"[0-9a-f]{8}-rank-\d{5,}-\d{5,}\.safetensors\Z", re.ASCII)
_ATTEMPT = re.compile(r"[0-9a-f]{8}\Z", re.ASCII)
_AT_ONCE = 8
_FULL_FILE_BYTES = 1 << 30
_READ_BYTES = 4 << 20
_SWEEPING = RetryLimits(give_up_s=5.0, attempts_max=3)
"""Leftovers may wait for the next sweep."""


class WritableObjectStore:
    """`spool_dir` holds deltas that await upload; default is this machine's temporary directory."""

    def __init__(
        self,
        url: str,
        *,
        streams: int = 4,
        retries: RetryLimits | None = None,
        spool_dir: Path | None = None,
    ) -> None:
        self._url = url
        self._objects = ObjectStore(url, retries=retries)
        self._streams = streams
        self._spool_dir = spool_dir or Path(tempfile.gettempdir())
        self.ranks_dir: Path | None = None

    def reader(self) -> Store:
        return Store(self._url)

    def writer(self) -> "ObjectWriter":
        return ObjectWriter(self._objects, ObjectStore(self._url, retries=_SWEEPING), self.reader())

    def draft(self, begun: str) -> "ObjectDraft":
        ref, attempt = _parts(begun)
        prefix = f"{ref.directory}/{attempt}-"
        return ObjectDraft(self._objects, prefix, streams=self._streams, spool_dir=self._spool_dir)


class ObjectDraft:
    """Puts `file` at `prefix` + `file`. `spool_dir` is where payloads wait."""

    full_file_bytes = _FULL_FILE_BYTES

    def __init__(self, objects: ObjectStore, prefix: str, *, streams: int, spool_dir: Path) -> None:
        self._objects = objects
        self._prefix = prefix
        self._spool_dir = spool_dir
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix="weight-upload")
        self._spools: dict[str, IO[bytes]] = {}
        self._uploads: list[Future[int]] = []
        self._is_closed = Event()

    def write(self, file: str, chunks: Iterable[Any]) -> int:
        # A failed upload's error is raised now, so that no more is encoded in vain.
        for upload in filter(Future.done, self._uploads):
            upload.result()
        with refusals(self._spool_dir):
            spool = tempfile.TemporaryFile(dir=self._spool_dir)  # noqa: SIM115 - until `close`
            self._spools[file] = spool
            for chunk in chunks:
                spool.write(chunk)
            spool.flush()
        self._start(file, partial(_pieces, spool.fileno()))
        return spool.tell()

    def write_all(self, files: Mapping[str, Iterable[Any]]) -> None:
        for file, chunks in files.items():
            self._start(file, partial(iter, chunks))
        self.settle()

    def settle(self) -> None:
        for upload in self._uploads:
            upload.result()
        self._uploads.clear()

    def written(self, file: str, published: str) -> Bytes:  # noqa: ARG002 - it is here as well
        return np.memmap(self._spools[file], dtype=np.uint8, mode="r")

    def close(self) -> None:
        self._is_closed.set()
        self._pool.shutdown(cancel_futures=True)
        for spool in self._spools.values():
            spool.close()

    def _start(self, file: str, read: Callable[[], Iterator[Any]]) -> None:
        def chunks() -> Iterator[Any]:
            for chunk in read():
                if self._is_closed.is_set():
                    raise Stale("this version was given up")
                yield chunk

        path = self._prefix + file
        self._uploads.append(self._pool.submit(self._objects.upload, path, chunks))


class ObjectWriter(StoreWriter):
    """`sweeping` are the same objects, with fewer retries."""

    def __init__(self, objects: ObjectStore, sweeping: ObjectStore, store: Store) -> None:
        self._objects = objects
        self._sweeping = sweeping
        self.store = store
        self._owner = secrets.token_hex(16).encode()
        self._left: dict[str, list[str]] = {}
        """Unfinished attempts, each with the objects created for it besides its shards."""
        objects.put(OWNER_FILE, self._owner)
        self._sweep_strangers()

    def refs(self) -> frozenset[VersionRef]:
        return frozenset(_by_version(self._objects.sizes()))

    def newest(self) -> WeightVersion:
        numbers = [ref.version for ref in self.refs()]
        with suppress(Corrupt):
            numbers.append(self.store.latest() or WeightVersion(0))
        newest = max(numbers, default=WeightVersion(0))
        while self._has_index(WeightVersion(newest + 1)):
            newest = WeightVersion(newest + 1)
        return newest

    def begin(self, ref: VersionRef) -> str:
        self.sweep()
        begun = f"{ref.directory}~{secrets.token_hex(4)}"
        self._left[begun] = []
        return begun

    def place(self, begun: str, shards: Sequence[Shard], *, alone: str) -> dict[str, str]:
        ref, attempt = _parts(begun)
        names = {
            shard.file: f"{attempt}-{checked_name(shard.file, what='shard')}" for shard in shards
        }

        def check(shard: Shard) -> None:
            path = f"{ref.directory}/{names[shard.file]}"
            with suppress(FileNotFoundError):
                if self._objects.size_bytes(path) == shard.record.bytes:
                    return
            raise Corrupt(f"{self._objects}/{path} is not as long as its rank wrote it")

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="weight-check") as pool:
            list(pool.map(check, shards))
        if alone and len(names) == 1:
            (file,) = names
            self._rename(begun, f"{ref.directory}/{names[file]}", f"{ref.directory}/{alone}")
            names[file] = alone
        return names

    def finish(self, begun: str, ref: VersionRef, small: Mapping[str, bytes]) -> None:
        self._check_owner(self._objects)
        files = {READY_FILE: b"", **small}
        files[INDEX_FILE] = files.pop(INDEX_FILE)
        for file, data in files.items():
            path = f"{ref.directory}/{file}"
            self._left[begun].append(path)
            try:
                self._objects.create(path, data)
            except FileExistsError as error:
                self._left[begun].remove(path)
                raise self._taken_over(f"{path} is there already") from error
        del self._left[begun]

    def point_latest(self, version: WeightVersion) -> None:
        self._check_owner(self._objects)
        self._objects.put(LATEST_FILE, latest_line(version))
        try:
            self._check_owner(self._objects)
        except ConfigError:
            self._put_right(version)
            raise
        except RoseMuxError as error:
            # The version is out: only a newer publisher would make it wrong.
            _LOG.warning("not known whether LATEST is still this publisher's: %s", error)

    def _put_right(self, version: WeightVersion) -> None:
        """Undo a LATEST that may have replaced a newer publisher's: point it to the newest version.
        That publisher puts LATEST after the index, so that an index put later needs no look."""
        # Listings may lag.
        after = WeightVersion(version + 1)
        if not self._has_index(version):
            # The newer one began anew in an emptied store, or has pruned this version.
            version = WeightVersion(0)
        while found := [
            newer
            for newer in {after, WeightVersion(version + 1), *(r.version for r in self.refs())}
            if newer > version and self._has_index(newer)
        ]:
            version = max(found)
            self._objects.put(LATEST_FILE, latest_line(version))

    def _has_index(self, version: WeightVersion) -> bool:
        return self._objects.has(f"{VersionRef(Kind.WEIGHT, version).directory}/{INDEX_FILE}")

    def remove(self, ref: VersionRef) -> None:
        # Without its index a version is gone for readers; after a kill here the next publisher
        # finishes.
        self._objects.remove([f"{ref.directory}/{INDEX_FILE}"])
        self._objects.remove(self._objects.sizes(ref.directory))

    def sizes(self) -> dict[VersionRef, int]:
        begun = {_parts(name)[0] for name in self._left}
        found = _by_version(self._objects.sizes())
        return {ref: sum(files.values()) for ref, files in found.items() if ref not in begun}

    def sweep(self) -> None:
        """Delete unfinished attempts; failed deletions wait for the next sweep."""
        for begun in tuple(self._left):
            try:
                self._sweep_attempt(begun)
            except RoseMuxError:
                return
            del self._left[begun]

    def _sweep_attempt(self, begun: str) -> None:
        ref, attempt = _parts(begun)
        if self._left[begun]:
            self._check_owner(self._sweeping)
            self._sweeping.remove(self._left[begun])
        found = self._sweeping.sizes(ref.directory)
        self._sweeping.remove(p for p in found if p.rpartition("/")[2].startswith(f"{attempt}-"))

    def _sweep_strangers(self) -> None:
        """Delete attempts of earlier publishers, whether they were killed or still run."""
        for ref, files in _by_version(self._objects.sizes()).items():
            if INDEX_FILE in files or self._objects.has(f"{ref.directory}/{INDEX_FILE}"):
                continue
            ours = {READY_FILE, CONFIG_FILE, FULL_SHARD_FILE}
            doomed = [file for file in files if file in ours or _OURS.match(file)]
            self._objects.remove(f"{ref.directory}/{file}" for file in doomed)

    def _rename(self, begun: str, path: str, to: str) -> None:
        """Rename the single file of an adapter by a copy; it is small."""
        self._check_owner(self._objects)
        self._left[begun].append(to)
        self._objects.copy(path, to)
        self._objects.remove([path])

    def _check_owner(self, objects: ObjectStore) -> None:
        try:
            found = objects.read(OWNER_FILE, 0, len(self._owner))
        except FileNotFoundError:
            found = b""
        if found != self._owner:
            raise self._taken_over(f"its {OWNER_FILE} is another's")

    def _taken_over(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self._objects} has another publisher, {what}: only the newest one may publish; stop "
            "one of them, or give it a store of its own"
        )


def _pieces(handle: int) -> Iterator[bytes]:
    """A file's bytes; mapped, they would count as memory in use."""
    at = 0
    while piece := os.pread(handle, _READ_BYTES, at):
        yield piece
        at += len(piece)


def _by_version(sizes: Mapping[str, int]) -> dict[VersionRef, dict[str, int]]:
    """Files of each version by name."""
    found: dict[VersionRef, dict[str, int]] = {}
    for path, size in sizes.items():
        directory, _, file = path.partition("/")
        ref = named_ref(directory)
        if ref is not None and file:
            found.setdefault(ref, {})[file] = size
    return found


def _parts(begun: str) -> tuple[VersionRef, str]:
    directory, _, attempt = begun.partition("~")
    ref = named_ref(directory)
    if ref is None or not _ATTEMPT.match(attempt):
        raise PeerProtocolError(f"{begun!r} is not a draft of this store")
    return ref, attempt
