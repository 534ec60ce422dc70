"""Compares new bits with the copy in a pool and yields the results in order.

Entries go in batches: a hand-over takes longer than comparing a small one. Batches of tensors that
take longer in Python than in a compiled loop are compared inline: threads would only wait for each
other's interpreter lock. Bounds the bytes held at a time; never looks at a bit.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from weightsync.elements.bits import Bits
from weightsync.encoding.codec import Encoded

_BATCH_BYTES = 1 << 20
_SMALL_BYTES = 8 << 10
"""Mean tensor size of a batch up to which it is compared inline."""


@dataclass(frozen=True, slots=True)
class Compared:
    entry: str
    encoded: Encoded | None
    """None if nothing changed."""


class StateComparison:
    """`in_flight_bytes` bounds the bytes held at a time, above one batch per thread."""

    def __init__(
        self,
        compare: Callable[[str, Bits], Compared],
        pool: Executor,
        *,
        threads: int,
        in_flight_bytes: int,
    ) -> None:
        self._compare = compare
        self._pool = pool
        self._threads = threads
        self._in_flight_bytes = in_flight_bytes
        self._batch_bytes = min(_BATCH_BYTES, in_flight_bytes // (2 * threads))
        self._waiting: deque[tuple[int, Callable[[], list[Compared]]]] = deque()
        self._held_bytes = 0
        self._open: list[tuple[str, Bits]] = []
        self._open_bytes = 0

    def make_room(self, size_bytes: int) -> Iterator[Compared]:
        """Yield finished results until `size_bytes` more fit."""
        while (
            len(self._waiting) >= self._threads
            and self._held_bytes + size_bytes > self._in_flight_bytes
        ):
            done_bytes, done = self._waiting.popleft()
            yield from done()
            self._held_bytes -= done_bytes

    def add(self, entry: str, bits: Bits) -> None:
        self._open.append((entry, bits))
        self._open_bytes += bits.nbytes
        self._held_bytes += bits.nbytes
        if self._open_bytes >= self._batch_bytes:
            self._hand_over()

    def finish(self) -> Iterator[Compared]:
        """Yield all remaining results."""
        self._hand_over()
        while self._waiting:
            yield from self._waiting.popleft()[1]()

    def _hand_over(self) -> None:
        batch, size_bytes = self._open, self._open_bytes
        self._open, self._open_bytes = [], 0
        if size_bytes > _SMALL_BYTES * len(batch):
            self._waiting.append((size_bytes, self._pool.submit(self._compare_all, batch).result))
            return
        done = self._compare_all(batch)
        self._waiting.append((size_bytes, lambda: done))

    def _compare_all(self, batch: list[tuple[str, Bits]]) -> list[Compared]:
        return [self._compare(entry, bits) for entry, bits in batch]
