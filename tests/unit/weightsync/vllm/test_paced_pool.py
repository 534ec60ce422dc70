"""Work that asks before each piece."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from weightsync.elements.batches import each
from weightsync.vllm.paced_pool import PacedPool


class CountingPace:
    def __init__(self) -> None:
        self.begun = self.ended = 0
        self._lock = threading.Lock()

    @contextmanager
    def piece(self) -> Iterator[None]:
        with self._lock:
            self.begun += 1
        try:
            yield
        finally:
            with self._lock:
                self.ended += 1

    def hurry(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def pool() -> Iterator[PacedPool]:
    made = PacedPool(2)
    yield made
    made.shutdown()


def test_without_a_pace_work_goes_as_ever(pool: PacedPool) -> None:
    assert list(pool.map(lambda x: x + 1, range(100))) == list(range(1, 101))


def test_each_batch_is_a_piece_and_results_keep_their_order(pool: PacedPool) -> None:
    pool.pace = pace = CountingPace()
    found = each(pool, lambda x: 2 * x, list(range(640)), lambda _: 1000)
    assert found == [2 * x for x in range(640)]
    assert pace.begun == pace.ended == 32


def test_an_error_of_a_piece_reaches_its_caller_and_the_piece_has_ended(pool: PacedPool) -> None:
    pool.pace = pace = CountingPace()
    with pytest.raises(ZeroDivisionError):
        list(pool.map(lambda x: 1 // x, [0]))
    assert pace.ended == 1


def test_a_piece_ends_when_the_accelerator_is_done_with_it() -> None:
    order: list[str] = []
    pace = CountingPace()
    pool = PacedPool(1, settle=lambda: order.append(f"settled before {pace.ended}"))
    pool.pace = pace
    pool.submit(lambda: order.append("worked")).result()
    pool.shutdown()
    assert order == ["worked", "settled before 0"]
