"""Comparison: in order, in few hand-overs, and within the bound on held bytes."""

from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weightsync.elements.bits import Bits, TensorSpec
from weightsync.publish.settings import WorkSettings
from weightsync.publish.share import Compared, compared
from weightsync.publish.trainer_state import Piece

MIB = 1 << 20


class _Counting(Executor):
    """An executor that runs inline and counts; results wait until requested."""

    def __init__(self) -> None:
        self.handed_over = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.handed_over += 1
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def _compared(entry: str, bits: Bits) -> Compared:
    return entry, None


def _run(sizes: list[int], in_flight_bytes: int) -> tuple[list[str], int, _Counting]:
    """(entries in order of output, most bytes held at a time, the pool)."""
    pool = _Counting()
    came: list[str] = []
    held = most = 0

    class _Held(Piece):
        def bits(self, *, own: bool) -> Bits:
            nonlocal held, most
            assert own
            held += self.spec.size_bytes
            most = max(most, held)
            return np.empty(self.spec.size_bytes, dtype=np.uint8)

    pieces = (_Held(str(i), TensorSpec("U8", (n,)), None, None) for i, n in enumerate(sizes))
    work = WorkSettings(threads=2, in_flight_bytes=in_flight_bytes)
    for entry, _ in compared(pieces, _compared, pool, work, own=True):
        came.append(entry)
        held -= sizes[int(entry)]
    return came, most, pool


@given(st.lists(st.integers(0, 3 * MIB), max_size=30), st.integers(1, 16 * MIB))
def test_everything_comes_out_in_order(sizes: list[int], in_flight_bytes: int) -> None:
    came, _, _ = _run(sizes, in_flight_bytes)
    assert came == [str(number) for number in range(len(sizes))]


@given(st.lists(st.integers(1, MIB), max_size=40))
def test_no_more_is_held_than_may_be(sizes: list[int]) -> None:
    _, most, _ = _run(sizes, 8 * MIB)
    assert most <= 8 * MIB


def test_each_thread_has_one_where_not_even_two_fit() -> None:
    _, most, _ = _run([3 * MIB] * 6, MIB)
    assert most == 2 * 3 * MIB


def test_tensors_of_some_size_are_handed_over_together() -> None:
    _, _, pool = _run([64 << 10] * 512, 64 * MIB)
    assert pool.handed_over == 32


def test_small_ones_are_compared_without_a_thread() -> None:
    came, _, pool = _run([1024] * 5000, 64 * MIB)
    assert len(came) == 5000
    assert pool.handed_over == 0
