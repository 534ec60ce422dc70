"""Tensors handed to threads in batches: each thread takes few large pieces.

A hand-over is a future, a lock and often a thread to wake; most tensors are done in less time.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

BATCH_BYTES = 4 << 20
_BATCHES = 32
"""Batches that a small state is cut into, so that no thread is left with a long last one."""
_AT_ONCE = 4
"""Batches that fit into a limit, if there is one: a thread's batch takes one part of it."""

_T = TypeVar("_T")
_R = TypeVar("_R")


def each(
    pool: Executor, work: Callable[[_T], _R], items: Sequence[_T], size_bytes: Callable[[_T], int]
) -> list[_R]:
    """`work` on every item, results in order; raises the error of the first failing item."""
    return [*spread(pool, work, items, size_bytes)]


def spread(
    pool: Executor,
    work: Callable[[_T], _R],
    items: Sequence[_T],
    size_bytes: Callable[[_T], int],
    *,
    limit_bytes: int | None = None,
) -> Iterator[_R]:
    """Yield results in order; at most as many items run at a time as fit, at least one.

    An exception ends the iteration, once none of its work runs any more.
    """

    def done(batch: Sequence[_T]) -> list[_R]:
        return [work(item) for item in batch]

    running: deque[tuple[int, Future[list[_R]]]] = deque()
    held_bytes = 0
    at_most = None if limit_bytes is None else limit_bytes // _AT_ONCE
    try:
        for batch, size in batches(items, size_bytes, at_most_bytes=at_most):
            while limit_bytes is not None and running and held_bytes + size > limit_bytes:
                done_bytes, oldest = running.popleft()
                yield from oldest.result()
                held_bytes -= done_bytes
            running.append((size, pool.submit(done, batch)))
            held_bytes += size
        while running:
            yield from running.popleft()[1].result()
    finally:
        wait([future for _, future in running if not future.cancel()])


def batches(
    items: Sequence[_T], size_bytes: Callable[[_T], int], *, at_most_bytes: int | None = None
) -> Iterator[tuple[list[_T], int]]:
    """(items, bytes) of neighbours until a batch is large enough; one over the limit is alone."""
    sizes = [size_bytes(item) for item in items]
    total = sum(sizes)
    target, limit = min(BATCH_BYTES, total // _BATCHES), at_most_bytes or total
    batch: list[_T] = []
    batch_bytes = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and batch_bytes + size > limit:
            yield batch, batch_bytes
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size
        if batch_bytes >= target:
            yield batch, batch_bytes
            batch, batch_bytes = [], 0
    if batch:
        yield batch, batch_bytes
