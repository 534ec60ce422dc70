"""Unsigned LEB128 numbers, seven bits a byte, the lowest first: in Python and in compiled loops."""

import numpy as np

from harvester.contracts.errors import Corrupt
from weightsync.elements.bits import Bytes
from weightsync.elements.compiled import compiled

MAX_BYTES = 9


def varint(value: int) -> bytes:
    """7 bits a byte, least significant first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class PayloadReader:
    """Walks through one payload; every read past its end is Corrupt."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self.at = 0
        """The next byte."""

    def take(self, length: int) -> memoryview:
        end = self.at + length
        if end > len(self._payload):
            raise Corrupt(f"payload of {len(self._payload)} bytes ends before byte {end}")
        piece = self._payload[self.at : end]
        self.at = end
        return piece

    def number(self, *, at_most: int) -> int:
        """A varint that may not exceed `at_most`."""
        payload, at, value = self._payload, self.at, 0
        for shift in range(0, 7 * MAX_BYTES, 7):
            if at == len(payload):
                raise Corrupt(f"payload of {at} bytes ends inside a number")
            byte = payload[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        else:
            raise Corrupt(f"a packed number has more than {MAX_BYTES} bytes")
        self.at = at
        if value > at_most:
            raise Corrupt(f"number {value} where at most {at_most} is possible")
        return value

    def finish(self) -> None:
        if self.at != len(self._payload):
            raise Corrupt(f"{len(self._payload) - self.at} bytes after the end of the payload")


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
