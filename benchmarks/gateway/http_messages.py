"""HTTP/1.1 messages from bytes, as little of it as the stub engine and the load need.

Both have to cost less than the routers between them: the stub reads requests with a length, the
load reads replies with a length or in chunks. Opens no socket and reads no clock.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class RequestReader:
    """Feed bytes in any portions; get (path, body) of each request that became whole."""

    def __init__(self) -> None:
        self._left = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Raises ValueError for a body in chunks, and for what is no HTTP/1.1."""
        self._left += data
        while (head_end := self._left.find(_HEAD_END)) >= 0:
            head = self._left[:head_end]
            found = _LENGTH.search(head)
            if found is None and _CHUNKED.search(head):
                raise ValueError("a request in chunks; send its length")
            end = head_end + 4 + (int(found[1]) if found else 0)
            if len(self._left) < end:
                return
            body, self._left = self._left[head_end + 4 : end], self._left[end:]
            _, target, version = head.partition(b"\r\n")[0].split(b" ")
            if version != b"HTTP/1.1":
                raise ValueError(f"{version!r}")
            yield target.partition(b"?")[0], body


@dataclass(slots=True)
class ReplyReader:
    """One reply. `body` has the chunks' frames too, until `payload` takes them off."""

    body: bytearray
    head: bytes = b""
    whole: bool = False
    _length: int | None = None

    @classmethod
    def empty(cls) -> "ReplyReader":
        return cls(bytearray())

    @property
    def status(self) -> int:
        return int(self.head[9:12]) if self.head else 0

    def feed(self, data: bytes) -> None:
        self.body += data
        if not self.head:
            end = self.body.find(_HEAD_END)
            if end < 0:
                return
            self.head = bytes(self.body[:end])
            del self.body[: end + 4]
            found = _LENGTH.search(self.head)
            self._length = int(found[1]) if found else None
        if self._length is None:
            self.whole = self.body.endswith(_LAST_CHUNK)
        else:
            self.whole = len(self.body) >= self._length

    def payload(self) -> bytes:
        """The body without frames. Raises ValueError unless the reply is whole."""
        if not self.whole:
            raise ValueError(f"the reply ends early, after {len(self.body)} bytes")
        if self._length is not None:
            return bytes(self.body)
        parts: list[bytes] = []
        at = 0
        while True:
            line_end = self.body.index(b"\r\n", at)
            size = int(self.body[at:line_end].partition(b";")[0], 16)
            if not size:
                return b"".join(parts)
            parts.append(bytes(self.body[line_end + 2 : line_end + 2 + size]))
            at = line_end + 2 + size + 2
