"""Gives the memory of unused KV blocks back to the operating system, page by page.

An engine takes its whole KV cache when it starts. A block is some bytes in each of several planes
(per layer, and per half where keys and values lie apart); neighbours in a plane touch, so that a
run of unused blocks covers whole pages even where one block covers none. The address space stays: a
page that was given back reads as zeros and is there again at the next write. Linux.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harvester.contracts.errors import Unsupported

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Plane:
    """One block's bytes at `address + block * stride_bytes`, for every block of a pool."""

    address: int
    stride_bytes: int
    block_bytes: int
    """Size of a block; at most the stride."""


@dataclass(frozen=True, slots=True)
class AddressRange:
    address: int
    length: int


def runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Consecutive numbers as (first, how many), in ascending order."""
    first = count = 0
    for block in sorted(blocks):
        if count and block == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = block, 1
    if count:
        yield first, count


def whole_pages(
    planes: Sequence[Plane], blocks: Iterable[int], *, page_bytes: int = mmap.PAGESIZE
) -> Iterator[AddressRange]:
    """The pages that hold nothing but bytes of these blocks."""
    together = list(runs(blocks))
    for plane in planes:
        touching = plane.block_bytes == plane.stride_bytes
        for first, count in together:
            pieces = [(first, count)] if touching else [(first + i, 1) for i in range(count)]
            for block, length in pieces:
                start = plane.address + block * plane.stride_bytes
                end = start + (length - 1) * plane.stride_bytes + plane.block_bytes
                start, end = -(-start // page_bytes) * page_bytes, end // page_bytes * page_bytes
                if start < end:
                    yield AddressRange(start, end - start)


def give_back(spans: Iterable[AddressRange]) -> int:
    """Returns how many bytes went back, resident or not. Raises Unsupported, OSError."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        raise Unsupported("giving memory back page by page needs Linux")
    given = 0
    for span in spans:
        address, length = ctypes.c_void_p(span.address), ctypes.c_size_t(span.length)
        if _LIBC.madvise(address, length, mmap.MADV_DONTNEED) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        given += span.length
    return given
