"""Batches: every tensor once and in order, few pieces for many small ones, none too large."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.elements.batches import BATCH_BYTES, batches, each

SIZES = st.lists(st.one_of(st.integers(0, 4096), st.integers(0, 3 * BATCH_BYTES)), max_size=60)


@given(SIZES)
def test_every_name_is_in_one_batch_and_in_its_place(sizes: list[int]) -> None:
    names = [str(number) for number in range(len(sizes))]
    found = list(batches(names, lambda name: sizes[int(name)]))
    assert [name for items, _ in found for name in items] == names
    assert all(items for items, _ in found)


@given(SIZES)
def test_a_batch_is_over_its_size_by_its_last_tensor_at_most(sizes: list[int]) -> None:
    names = [str(number) for number in range(len(sizes))]
    for items, _ in batches(names, lambda name: sizes[int(name)]):
        assert sum(sizes[int(name)] for name in items[:-1]) < BATCH_BYTES


@given(SIZES, st.integers(1, 2 * BATCH_BYTES))
def test_a_batch_is_within_its_limit_or_one_tensor(sizes: list[int], limit: int) -> None:
    found = batches(range(len(sizes)), sizes.__getitem__, at_most_bytes=limit)
    for items, size_bytes in found:
        assert size_bytes == sum(sizes[number] for number in items)
        assert size_bytes <= limit or len(items) == 1


def test_many_small_tensors_are_few_pieces_and_enough_for_two_threads() -> None:
    names = [str(number) for number in range(10_000)]
    assert 16 <= len(list(batches(names, lambda _: 100))) <= 64


def test_results_come_in_order_and_the_first_error_is_raised() -> None:
    names = [str(number) for number in range(500)]
    with ThreadPoolExecutor(2) as pool:
        assert each(pool, int, names, lambda _: 10) == list(range(500))
        with pytest.raises(ValueError, match="'x'"):
            each(pool, int, [*names, "x", "y"], lambda _: 10)
