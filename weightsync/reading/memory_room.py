"""Budget of the memory that a receiver takes beside the weights that it writes to.

Half of it is kept: payloads and decoded changes that wait for the pause. The other half is lent to
tensors in transit. A tensor larger than a half goes alone. Decides on sizes only; allocates
nothing.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

from harvester.contracts.errors import ConfigError
from weightsync.elements.batches import batches

K = TypeVar("K")
T = TypeVar("T")

STAGING_BYTES = 1 << 30
"""A step of a 70 GB model fits undecoded, and one of a 10 GB model decoded, which shortens the
pause; a full checkpoint of either waits in a file."""
MIN_STAGING_BYTES = 1 << 20
_AT_ONCE = 4
"""Small tensors are batched, but one thread's batch takes at most this part of the lent memory."""


class MemoryRoom:
    """Memory budget of one staging. Used by one thread at a time."""

    def __init__(self, limit_bytes: int) -> None:
        """Raises ConfigError for a limit below MIN_STAGING_BYTES."""
        if limit_bytes < MIN_STAGING_BYTES:
            raise ConfigError(f"staging_bytes must be at least {MIN_STAGING_BYTES}")
        self.limit_bytes = limit_bytes
        self._kept_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """Largest number of bytes in transit at a time."""
        return self.limit_bytes // 2

    def keep(self, size_bytes: int) -> bool:
        """Whether so many more bytes may stay in memory; if so they count until given back."""
        fits = self._kept_bytes + size_bytes <= self.limit_bytes // 2
        self._kept_bytes += size_bytes if fits else 0
        return fits

    def give_back(self, size_bytes: int) -> None:
        self._kept_bytes -= size_bytes

    def spread(
        self,
        pool: Executor,
        work: Callable[[K], T],
        items: Sequence[K],
        size_of: Callable[[K], int],
    ) -> Iterator[T]:
        """Yield results in order; at most as many items run at a time as fit, at least one.

        An exception ends the iteration, once none of its work runs any more.
        """

        def done(batch: Sequence[K]) -> list[T]:
            return [work(item) for item in batch]

        running: deque[tuple[int, Future[list[T]]]] = deque()
        lent_bytes = 0
        try:
            for batch, size in batches(items, size_of, at_most_bytes=self.lent_bytes // _AT_ONCE):
                while running and lent_bytes + size > self.lent_bytes:
                    done_bytes, oldest = running.popleft()
                    yield from oldest.result()
                    lent_bytes -= done_bytes
                running.append((size, pool.submit(done, batch)))
                lent_bytes += size
            while running:
                yield from running.popleft()[1].result()
        finally:
            left = [future for _, future in running if not future.cancel()]
            wait(left)
