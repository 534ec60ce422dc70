"""Unsigned LEB128 numbers in payload headers."""

from harvester.contracts.errors import Corrupt

_MAX_BYTES = 9


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
        self._at = 0

    @property
    def at(self) -> int:
        """The next byte."""
        return self._at

    def take(self, length: int) -> memoryview:
        end = self._at + length
        if end > len(self._payload):
            raise Corrupt(f"payload of {len(self._payload)} bytes ends before byte {end}")
        piece = self._payload[self._at : end]
        self._at = end
        return piece

    def number(self, *, at_most: int) -> int:
        """A varint that may not exceed `at_most`."""
        payload, at, value = self._payload, self._at, 0
        for shift in range(0, 7 * _MAX_BYTES, 7):
            if at == len(payload):
                raise Corrupt(f"payload of {at} bytes ends inside a number")
            byte = payload[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        else:
            raise Corrupt(f"number longer than {_MAX_BYTES} bytes")
        self._at = at
        if value > at_most:
            raise Corrupt(f"number {value} where at most {at_most} is possible")
        return value

    def finish(self) -> None:
        if self._at != len(self._payload):
            raise Corrupt(f"{len(self._payload) - self._at} bytes after the end of the payload")
