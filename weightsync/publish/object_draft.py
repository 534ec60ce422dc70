"""One rank's files of a version in an object store: several uploads at once, from a bounded memory.

A delta's payloads go to a nameless file of this machine first. From there they are uploaded, and
again where that fails, while the next ones are encoded; and from there the publisher's copy moves
once the version is out. A full checkpoint is uploaded straight from the copy.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import IO, Any

import numpy as np

from harvester.contracts.errors import Stale
from weightsync.elements.bits import Bytes
from weightsync.layout.durable import refusals
from weightsync.transport.objects import ObjectStore

_FULL_FILE_BYTES = 1 << 30
_READ_BYTES = 4 << 20


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


def _pieces(handle: int) -> Iterator[bytes]:
    """A file's bytes; mapped, they would count as memory in use."""
    at = 0
    while piece := os.pread(handle, _READ_BYTES, at):
        yield piece
        at += len(piece)
