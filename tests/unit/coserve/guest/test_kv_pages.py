"""Which pages a set of KV blocks covers, and that giving them back spares all others."""

import ctypes
import errno
import mmap
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.guest.kv_pages import AddressRange, Plane, give_back, runs, whole_pages

PAGE = 4096


@given(st.sets(st.integers(0, 60)))
def test_runs_are_the_blocks_in_order_and_never_touch(blocks: set[int]) -> None:
    found = list(runs(blocks))
    covered = [first + i for first, count in found for i in range(count)]
    assert covered == sorted(blocks)
    assert all(a + n < b for (a, n), (b, _) in pairwise(found))


@given(
    address=st.integers(0, 3 * PAGE),
    block_bytes=st.integers(1, 3 * PAGE),
    gap=st.sampled_from([0, 0, 1, 700]),
    blocks=st.sets(st.integers(0, 20)),
)
def test_a_page_is_given_back_exactly_if_these_blocks_own_every_byte(
    address: int, block_bytes: int, gap: int, blocks: set[int]
) -> None:
    stride = block_bytes + gap
    owned = set()
    for block in blocks:
        start = address + block * stride
        owned |= set(range(start, start + block_bytes))
    last = address + 21 * stride
    whole = {
        page
        for page in range(last // PAGE + 1)
        if all(byte in owned for byte in range(page * PAGE, (page + 1) * PAGE))
    }
    # Blocks with a gap between them never share a page that both own whole.
    spans = list(whole_pages([Plane(address, stride, block_bytes)], blocks, page_bytes=PAGE))
    pages = [span.address // PAGE + i for span in spans for i in range(span.length // PAGE)]
    assert all(span.address % PAGE == span.length % PAGE == 0 for span in spans)
    assert len(pages) == len(set(pages))
    assert set(pages) == whole


def test_neighbours_smaller_than_a_page_cover_one_together() -> None:
    plane = Plane(address=0, stride_bytes=1024, block_bytes=1024)
    assert list(whole_pages([plane], {4, 5, 6}, page_bytes=PAGE)) == []
    assert list(whole_pages([plane], {3, 4, 5, 6, 7}, page_bytes=PAGE)) == [
        AddressRange(PAGE, PAGE)
    ]


def test_returned_pages_read_as_zeros_and_the_rest_stays() -> None:
    size = mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"x" * (4 * size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert give_back([AddressRange(address + size, 2 * size)]) == 2 * size
    assert memory[:size] == memory[3 * size :] == b"x" * size
    assert memory[size : 3 * size] == bytes(2 * size)


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError) as raised:
        give_back([AddressRange(mmap.PAGESIZE, mmap.PAGESIZE)])
    assert raised.value.errno == errno.ENOMEM
