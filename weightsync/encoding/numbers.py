"""Varints in compiled loops: seven bits a byte, the lowest first. In Python: varint.py."""

import numpy as np

from weightsync.elements.bits import Bytes
from weightsync.elements.compiled import compiled

MAX_BYTES = 9


@compiled
def number_at(payload: Bytes, at: int, at_most: int) -> tuple[int, int]:
    """(varint, end offset); (0, -1) if there is none of at most `at_most`."""
    value = 0
    for nth in range(MAX_BYTES):
        if at < 0 or at + nth >= payload.size:
            break
        byte = np.int64(payload[at + nth])
        value |= int(byte & 0x7F) << (7 * nth)
        if byte < 0x80:
            return (value, at + nth + 1) if value <= at_most else (0, -1)
    return 0, -1


@compiled
def put_number(payload: Bytes, at: int, value: int) -> int:
    """A varint; returns the byte behind it."""
    while value >= 0x80:
        payload[at] = value & 0x7F | 0x80
        value >>= 7
        at += 1
    payload[at] = value
    return at + 1
