"""A payload of many megabytes in the making.

It lies in pages of its own, of which only those that were written exist and which go back to the
system at once. From the heap, where a trainer's own memory lies between, they would not.
"""

import mmap
from typing import Any

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


class LargePayload:
    """Bytes that are appended, up to `room_bytes` of them."""

    def __init__(self, room_bytes: int) -> None:
        self._pages = memoryview(mmap.mmap(-1, max(1, room_bytes), flags=_FLAGS))
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def fits(self, piece: Any) -> bool:
        return self._size + len(piece) <= len(self._pages)

    def append(self, piece: Any) -> None:
        """`piece` is anything of bytes."""
        end = self._size + len(piece)
        self._pages[self._size : end] = piece
        self._size = end

    def view(self) -> memoryview:
        """What was appended; the pages go with the last view of them."""
        return self._pages[: self._size].toreadonly()
