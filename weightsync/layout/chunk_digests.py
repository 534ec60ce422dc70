"""Digests of a file's chunks, so that a part of it can be believed without the rest.

One chunk length per file, a power of two: at most 4096 chunks, and none of less than 64 KiB, so
that an index stays small. A file of one chunk needs none: its own digest is that of the chunk.
Never opens a file.
"""

from typing import Any

import xxhash

from weightsync.elements.bits import Bytes

MIN_CHUNK_BYTES = 64 << 10
_MAX_CHUNKS = 4096
_DIGITS = 16


def chunk_bytes_for(size_bytes: int) -> int:
    """The chunk length of a file of about this size; 0 if the file is one chunk."""
    if size_bytes <= MIN_CHUNK_BYTES:
        return 0
    chunk = MIN_CHUNK_BYTES
    while chunk * _MAX_CHUNKS < size_bytes:
        chunk *= 2
    return chunk


def chunk_digest(data: Bytes) -> str:
    """xxh3-64 of one chunk, as 16 hexadecimal digits."""
    return str(xxhash.xxh3_64_hexdigest(data.data))


def digest_at(digests: str, chunk: int) -> str:
    """The digest of one chunk from the joined digests of all."""
    return digests[_DIGITS * chunk : _DIGITS * (chunk + 1)]


def fit(digests: str, *, size_bytes: int, chunk_bytes: int) -> bool:
    """Whether these can be the digests of a file."""
    if chunk_bytes == 0:
        return digests == ""
    if chunk_bytes < MIN_CHUNK_BYTES or set(digests) - set("0123456789abcdef"):
        return False
    return len(digests) == _DIGITS * -(-size_bytes // chunk_bytes)


class ChunkDigests:
    """Chunk digests of a file as it is written; `chunk_bytes` 0 makes none."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._open = xxhash.xxh3_64()
        self._open_bytes = 0
        self._done: list[str] = []

    def update(self, data: Any) -> None:
        """The next bytes: anything with the buffer protocol."""
        view = memoryview(data)
        if not self._chunk_bytes or not view.nbytes:
            return
        view = view.cast("B")
        while len(view):
            part = view[: self._chunk_bytes - self._open_bytes]
            self._open.update(part)
            self._open_bytes += len(part)
            view = view[len(part) :]
            if self._open_bytes == self._chunk_bytes:
                self._close()

    def all(self) -> str:
        """All digests in order, the last one of the remaining bytes."""
        if self._open_bytes:
            self._close()
        return "".join(self._done)

    def _close(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open = xxhash.xxh3_64()
        self._open_bytes = 0
