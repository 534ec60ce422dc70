"""Tensors handed to threads in batches: each thread takes few large pieces.

A hand-over is a future, a lock and often a thread to wake; most tensors are done in less time.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Generic, NamedTuple, TypeVar

BATCH_BYTES = 4 << 20
_BATCHES = 32
"""Batches that a small state is cut into, so that no thread is left with a long last one."""

_T = TypeVar("_T")
_R = TypeVar("_R")


class Batch(NamedTuple, Generic[_T]):
    items: list[_T]
    size_bytes: int


def each(
    pool: Executor,
    work: Callable[[_T], _R],
    items: Sequence[_T],
    size_bytes: Callable[[_T], int],
) -> list[_R]:
    """`work` on every item, results in order; raises what the first failing item raised.

    Items behind a failing one may be left undone.
    """

    def done(batch: Batch[_T]) -> list[_R]:
        return [work(item) for item in batch.items]

    return [result for results in pool.map(done, batches(items, size_bytes)) for result in results]


def batches(
    items: Sequence[_T], size_bytes: Callable[[_T], int], *, at_most_bytes: int | None = None
) -> Iterator[Batch[_T]]:
    """Neighbouring items until a batch is large enough; one over `at_most_bytes` is alone."""
    sizes = [size_bytes(item) for item in items]
    total = sum(sizes)
    wanted, limit = min(BATCH_BYTES, total // _BATCHES), at_most_bytes or total
    batch: list[_T] = []
    batch_bytes = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and batch_bytes + size > limit:
            yield Batch(batch, batch_bytes)
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size
        if batch_bytes >= wanted:
            yield Batch(batch, batch_bytes)
            batch, batch_bytes = [], 0
    if batch:
        yield Batch(batch, batch_bytes)
