"""A payload of many megabytes in the making.

It lies in pages of its own, of which only those that were written exist and which go back to the
system at once. From the heap, where a trainer's own memory lies between, they would not.
"""

import mmap
from typing import Any

_FRONT_BYTES = 64
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


class LargePayload:
    """Bytes that are appended, up to `room_bytes`; what is known last may come to the front."""

    def __init__(self, room_bytes: int) -> None:
        self._pages = memoryview(mmap.mmap(-1, _FRONT_BYTES + room_bytes, flags=_FLAGS))
        self._start = self._end = _FRONT_BYTES

    def __len__(self) -> int:
        return self._end - self._start

    def append(self, piece: Any) -> None:
        """`piece` is anything of bytes."""
        end = self._end + len(piece)
        self._pages[self._end : end] = piece
        self._end = end

    def prepend(self, piece: bytes) -> None:
        """Up to 64 bytes in all."""
        start = self._start - len(piece)
        self._pages[start : self._start] = piece
        self._start = start

    def clear(self) -> None:
        self._start = self._end = _FRONT_BYTES

    def view(self) -> memoryview:
        """What is in it; the pages go with the last view of them."""
        return self._pages[self._start : self._end].toreadonly()
