"""A buffer in which a payload of many megabytes is built.

It has separate pages, of which only written ones exist and which return to the system at once. Heap
memory would not, since a trainer's own allocations lie in between.
"""

import mmap
from typing import Any

_FRONT_BYTES = 64
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


class LargePayload:
    """Bytes that are appended, up to `room_bytes`; a header may be prepended at the end."""

    def __init__(self, room_bytes: int) -> None:
        self._pages = memoryview(mmap.mmap(-1, _FRONT_BYTES + room_bytes, flags=_FLAGS))
        self._start = self._end = _FRONT_BYTES

    def __len__(self) -> int:
        return self._end - self._start

    def append(self, piece: Any) -> None:
        """Append an object with the buffer protocol."""
        end = self._end + len(piece)
        self._pages[self._end : end] = piece
        self._end = end

    def prepend(self, piece: bytes) -> None:
        """Put bytes in front, up to 64 in all."""
        start = self._start - len(piece)
        self._pages[start : self._start] = piece
        self._start = start

    def clear(self) -> None:
        self._start = self._end = _FRONT_BYTES

    def view(self) -> memoryview:
        """The content; the pages are freed with its last view."""
        return self._pages[self._start : self._end].toreadonly()
