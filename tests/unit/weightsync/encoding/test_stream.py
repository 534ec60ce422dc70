"""Compressed runs of bytes never cost more memory than their reader allows."""

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import Corrupt
from weightsync.encoding.stream import pack_frame, pack_stream, unpack_frame, unpack_stream


@given(st.binary(max_size=3000))
def test_streams_and_frames_return_what_they_were_given(data: bytes) -> None:
    raw = np.frombuffer(data, dtype=np.uint8)
    packed = pack_stream(raw)
    assert len(packed) <= len(data)
    assert unpack_stream(memoryview(packed), len(data)).tobytes() == data
    assert unpack_frame(memoryview(pack_frame(raw)), len(data)).tobytes() == data


def test_a_frame_that_announces_too_much_is_refused_before_it_is_decompressed() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    assert len(bomb) < 4096
    with pytest.raises(Corrupt, match="announces 16777216 bytes where 1000 are allowed"):
        unpack_frame(memoryview(bomb), 1000)


def test_a_frame_without_an_announced_size_is_bounded_too() -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 24))
    with pytest.raises(Corrupt):
        unpack_frame(memoryview(bomb), 1000)


def test_a_stream_of_another_length_is_refused() -> None:
    packed = pack_stream(np.zeros(5000, dtype=np.uint8))
    for length in (4999, 5001):
        with pytest.raises(Corrupt):
            unpack_stream(memoryview(packed), length)
