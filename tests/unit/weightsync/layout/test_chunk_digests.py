"""Digests of chunks: the same however the bytes come, and refused where they fit no file."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weightsync.layout.chunk_digests import (
    MIN_CHUNK_BYTES,
    ChunkDigests,
    chunk_bytes_for,
    chunk_digest,
    digest_at,
    fit,
)

DATA = np.random.default_rng(0).integers(0, 256, 5 * MIN_CHUNK_BYTES // 2, dtype=np.uint8)


@given(cuts=st.lists(st.integers(0, DATA.size), max_size=6))
def test_the_digests_are_those_of_the_chunks(cuts: list[int]) -> None:
    digests = ChunkDigests(MIN_CHUNK_BYTES)
    for part in np.split(DATA, sorted(cuts)):
        digests.update(part.data)
    told = digests.all()
    assert fit(told, size_bytes=DATA.size, chunk_bytes=MIN_CHUNK_BYTES)
    for chunk in range(3):
        part = DATA[chunk * MIN_CHUNK_BYTES : (chunk + 1) * MIN_CHUNK_BYTES]
        assert digest_at(told, chunk) == chunk_digest(part)


def test_a_small_file_has_none() -> None:
    digests = ChunkDigests(chunk_bytes_for(MIN_CHUNK_BYTES))
    digests.update(b"x" * 100)
    assert digests.all() == ""
    assert fit("", size_bytes=100, chunk_bytes=0)


@given(size_bytes=st.integers(MIN_CHUNK_BYTES + 1, 1 << 45))
def test_chunks_are_few_and_not_small(size_bytes: int) -> None:
    chunk_bytes = chunk_bytes_for(size_bytes)
    assert chunk_bytes >= MIN_CHUNK_BYTES
    assert 2 <= -(-size_bytes // chunk_bytes) <= 4096


def test_impossible_digests_of_a_file_do_not_fit() -> None:
    chunk = MIN_CHUNK_BYTES
    for digests, size_bytes, chunk_bytes in [
        ("", 2 * chunk, chunk),
        ("0" * 16, 2 * chunk, chunk),
        ("0" * 48, 2 * chunk, chunk),
        ("x" * 32, 2 * chunk, chunk),
        ("0" * 32, 2 * chunk, 0),
        ("0" * 32, 2, 1),
        ("0" * 32, 2 * chunk, -chunk),
    ]:
        assert not fit(digests, size_bytes=size_bytes, chunk_bytes=chunk_bytes)
