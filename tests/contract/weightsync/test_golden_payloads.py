"""Payload bytes that are in stores already: every later reader must read exactly these."""

import numpy as np
import pytest

from weightsync.elements.bits import Bits, TensorSpec
from weightsync.encoding.codec import Encoding, decode, encode_as
from weightsync.encoding.delta import checked_apply

OLD = np.array([0x3F80] * 300, dtype=np.uint16)


def _new() -> Bits:
    """+1 at 0 and 299, -1 at 2, another value at 5, a NaN with a payload at 280."""
    new = OLD.copy()
    new[[0, 299]] += np.uint16(1)
    new[2] -= np.uint16(1)
    new[5] = 0x3F90
    new[280] = 0x7FC1
    return new


GOLDEN = {
    Encoding.DENSE: "0000e5000098813f803f7f3f803f803f903f80c17f803f813f0200c0214054b92f",
    Encoding.XOR: "28b52ffd605801d500008801000000ff0000000000100041400001000200003942542009",
    # a frame of: 6 changes at bytes 0, 4, 10, 560, 561, 598; their new bytes
    Encoding.OVERWRITE: (
        "28b52ffd2022110100"
        "06000000"
        "00000000 04000000 0a000000 30020000 31020000 56020000"
        "817f90c17f81"
    ),
    Encoding.CONTEXT: (
        "010302 ac02"  # format 1, classes, 2 bytes an element, 300 elements
        "88 01"  # steps take 136 - 127 low bits, one class
        "00 05 00 10"  # of all keys; gaps take 5 low bits, fars none; 16 bytes
        "010d0b1d0428010000fc000100580a00"
    ),
    Encoding.ROSEMUX: (
        "010002"  # format 1, sparse, 2 bytes an element
        "ac02 03 02 04 03"  # 300 elements, 3 small, 2 far, 4 and 3 gap bytes
        "04 0001ff29"  # gaps 0, 1, 255 + 41
        "01 02"  # the second small change is -1
        "03 05ff13"  # far gaps 5, 255 + 19
        "02 2082"  # low bytes of zigzag(0x10) = 0x0020 and zigzag(0x4041) = 0x8082
        "02 0080"  # their high bytes
    ),
}
PLANES = (
    "010102 06"  # format 1, planes, 2 bytes an element; 6 elements
    "06 020002f10200"  # low bytes of the zigzag differences
    "06 0000007e0000"  # high bytes
)


@pytest.mark.parametrize("encoding", GOLDEN)
def test_a_stored_payload_is_read_as_it_was_meant(encoding: Encoding) -> None:
    bits = OLD.copy()
    payload = memoryview(bytes.fromhex(GOLDEN[encoding]))
    checked_apply(decode(encoding, payload, TensorSpec("BF16", (300,))), bits)
    assert (bits == _new()).all()


def test_a_stored_planes_payload_is_read_as_it_was_meant() -> None:
    bits = np.array([0x3F80] * 6, dtype=np.uint16)
    payload = memoryview(bytes.fromhex(PLANES))
    checked_apply(decode(Encoding.ROSEMUX, payload, TensorSpec("BF16", (6,))), bits)
    assert bits.tolist() == [0x3F81, 0x3F80, 0x3F81, 0x0007, 0x3F81, 0x3F80]


def test_the_rosemux_writer_still_writes_these_bytes() -> None:
    """The other writers go through zstd, whose bytes may change with its version."""
    encoded = encode_as(Encoding.ROSEMUX, OLD, _new())
    assert encoded is not None
    assert encoded.payload == bytes.fromhex(GOLDEN[Encoding.ROSEMUX])
