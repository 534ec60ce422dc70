"""Addresses that stay while the memory behind them comes and goes, as in vLLM's sleep mode.

A piece is reserved once; asleep it has an address and nothing behind it. `CpuVirtualMemory` stands
in for a GPU in rehearsals and tests: its pages are really lost while they are unmapped.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from harvester.contracts.clock import monotonic_ns


@dataclass(slots=True)
class CallTimes:
    """Seconds of each call of the memory interface, by its name."""

    _taken: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        began_ns = monotonic_ns()
        yield
        self._taken.setdefault(name, []).append((monotonic_ns() - began_ns) * 1e-9)

    def take(self) -> dict[str, list[float]]:
        """Calls since the last `take`."""
        taken, self._taken = self._taken, {}
        return taken


class VirtualMemory(Protocol):
    @property
    def granularity_bytes(self) -> int:
        """Pieces are multiples of it."""
        ...

    @property
    def calls(self) -> CallTimes: ...

    def reserve(self, size_bytes: int) -> int:
        """An address with nothing behind it."""
        ...

    def map(self, address: int) -> None:
        """Puts new memory behind a whole reserved piece; its contents are undefined."""
        ...

    def unmap(self, address: int) -> None:
        """Gives the piece's memory back; its contents are lost."""
        ...

    def copy(self, *, to: int, source: int, size_bytes: int) -> None:
        """Copies between mapped pieces, tensors of the device and host memory; done on return."""
        ...

    def close(self) -> None:
        """Gives back all memory and addresses."""
        ...


class CpuVirtualMemory:
    """Anonymous mappings of the host: MADV_DONTNEED loses their pages."""

    def __init__(self) -> None:
        self._pieces: dict[int, mmap.mmap] = {}
        self._mapped: set[int] = set()
        self._calls = CallTimes()

    @property
    def granularity_bytes(self) -> int:
        return mmap.PAGESIZE

    @property
    def calls(self) -> CallTimes:
        return self._calls

    def reserve(self, size_bytes: int) -> int:
        piece = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        self._pieces[address] = piece
        return address

    def map(self, address: int) -> None:
        if address in self._mapped:
            raise ValueError(f"{address:#x} is mapped already")
        with self._calls.measured("madvise_willneed"):
            self._pieces[address].madvise(mmap.MADV_WILLNEED)
        self._mapped.add(address)

    def unmap(self, address: int) -> None:
        self._mapped.remove(address)
        with self._calls.measured("madvise_dontneed"):
            self._pieces[address].madvise(mmap.MADV_DONTNEED)

    def copy(self, *, to: int, source: int, size_bytes: int) -> None:
        for address in {to, source} & self._pieces.keys():
            if address not in self._mapped:
                raise ValueError(f"{address:#x} has nothing behind it")
        with self._calls.measured("memmove"):
            ctypes.memmove(to, source, size_bytes)

    def close(self) -> None:
        self._mapped.clear()
        self._pieces.clear()
