"""A process that keeps a core busy as a guest's engine does: run as a program, `KIND` its argument.

Prints one line when it has begun, and ends with its parent.
"""

import mmap
import os
import sys
from collections.abc import Callable

import numpy as np

from harvester.platform.parent import end_with

_VALUES, _ROWS = 4000, 40
_PAGES_BYTES = 64 << 20
_FILE_BYTES = 64 << 20


def steps() -> Callable[[], object]:
    """Products that read tens of megabytes of weights, as a decode step does."""
    weights = np.ones((_VALUES, _VALUES), dtype=np.float32)
    batch = np.ones((_VALUES, _ROWS), dtype=np.float32)
    return lambda: weights @ batch


def pages() -> Callable[[], object]:
    """Memory that is mapped, touched and returned: time in the kernel, which zeroes each page."""

    def once() -> None:
        with mmap.mmap(-1, _PAGES_BYTES) as memory:
            for at in range(0, _PAGES_BYTES, mmap.PAGESIZE):
                memory[at] = 1

    return once


def files() -> Callable[[], object]:
    """A file that is read from memory in one call."""
    file = os.memfd_create("held-core")
    os.write(file, bytes(_FILE_BYTES))
    buffer = bytearray(_FILE_BYTES)
    return lambda: os.preadv(file, [buffer], 0)


def spins() -> Callable[[], object]:
    return lambda: None


KINDS: dict[str, Callable[[], Callable[[], object]]] = {
    "awake": spins,
    "steps": steps,
    "pages": pages,
    "files": files,
}


def main() -> None:
    end_with(os.getppid())
    once = KINDS[sys.argv[1]]()
    once()
    print("begun", flush=True)
    while True:
        once()


if __name__ == "__main__":
    main()
