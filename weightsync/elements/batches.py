"""Tensors handed to threads in batches: each thread takes few large pieces.

A hand-over is a future, a lock and often a thread to wake; most tensors are done in less time.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import TypeVar

BATCH_BYTES = 4 << 20
_BATCHES = 32
"""A small state is cut into so many, so that no thread is left with a long last one."""

_R = TypeVar("_R")


def each(
    pool: Executor,
    work: Callable[[str], _R],
    names: Sequence[str],
    size_bytes: Callable[[str], int],
) -> list[_R]:
    """`work` on every name, results in order; raises what the first failing name raised.

    Names behind a failing one may be left undone.
    """

    def done(batch: list[str]) -> list[_R]:
        return [work(name) for name in batch]

    return [result for results in pool.map(done, batches(names, size_bytes)) for result in results]


def batches(names: Sequence[str], size_bytes: Callable[[str], int]) -> Iterator[list[str]]:
    """Neighbours together, until they are as large as a batch has to be."""
    sizes = [size_bytes(name) for name in names]
    wanted = min(BATCH_BYTES, sum(sizes) // _BATCHES)
    batch: list[str] = []
    batch_bytes = 0
    for name, size in zip(names, sizes, strict=True):
        batch.append(name)
        batch_bytes += size
        if batch_bytes >= wanted:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch
