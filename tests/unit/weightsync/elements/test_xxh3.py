"""The compiled hash is the library's, whatever the length and wherever its input was cut."""

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.elements import xxh3
from weightsync.elements.state_hash import digest_from

EDGES = [241, 255, 256, 257, 1023, 1024, 1025, 1088, 1089, 2047, 2048, 2049, 65_536, 65_601]


def _bytes(size: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", EDGES)
def test_it_is_the_librarys_hash(size: int) -> None:
    data, sums = _bytes(size), xxh3.started()
    xxh3.absorb(sums, data, 0, size)
    assert digest_from(sums, data) == xxhash.xxh3_128_hexdigest(data)


@given(st.integers(241, 20_000), st.integers(0, 2**32 - 1), st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_it_does_not_matter_in_how_many_pieces_it_is_taken(
    size: int, seed: int, blocks: int
) -> None:
    data, sums = _bytes(size, seed), xxh3.started()
    step = blocks * xxh3.BLOCK_BYTES
    for start in range(0, size, step):
        xxh3.absorb(sums, data, start, min(size, start + step))
    assert digest_from(sums, data) == xxhash.xxh3_128_hexdigest(data)


@pytest.mark.parametrize("size", [0, 1, 16, 128, 240])
def test_an_input_too_short_for_the_kernel_is_left_to_the_library(size: int) -> None:
    data, sums = _bytes(size), xxh3.started()
    xxh3.absorb(sums, data, 0, size)
    assert digest_from(sums, data) == xxhash.xxh3_128_hexdigest(data)


def test_it_reads_data_that_is_not_aligned() -> None:
    data, sums = _bytes(5001)[1:], xxh3.started()
    xxh3.absorb(sums, data, 0, data.size)
    assert digest_from(sums, data) == xxhash.xxh3_128_hexdigest(data)
