"""Byte ranges, and how HTTP writes them (RFC 9110, section 14).

One range per request, never several. Never touches a file or a socket.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from harvester.contracts.errors import PeerProtocolError

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z", re.ASCII | re.IGNORECASE)
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})\Z", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True, order=True)
class ByteSpan:
    """The bytes from `start` up to, but not including, `stop`."""

    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start

    def pieces(self, piece_bytes: int) -> Iterator["ByteSpan"]:
        """The span cut into runs of at most `piece_bytes`."""
        for start in range(self.start, self.stop, piece_bytes):
            yield ByteSpan(start, min(start + piece_bytes, self.stop))


def requested_span(header: str | None, size_bytes: int) -> ByteSpan | None:
    """The span that a request's Range selects; None if the file cannot satisfy it (416)."""
    if header is None:
        return ByteSpan(0, size_bytes)
    match = _RANGE.match(header.strip())
    if match is None:
        return None
    first, last = match.groups()
    if not first:
        start, stop = max(0, size_bytes - int(last or 0)), size_bytes
    else:
        start, stop = int(first), min(int(last) + 1, size_bytes) if last else size_bytes
    return ByteSpan(start, stop) if start < stop else None


def range_header(span: ByteSpan) -> str:
    """The `Range` header of a request for `span`."""
    return f"bytes={span.start}-{span.stop - 1}"


def content_range(span: ByteSpan, size_bytes: int) -> str:
    """The `Content-Range` header of a reply with `span` of a file."""
    return f"bytes {span.start}-{span.stop - 1}/{size_bytes}"


def answered_span(header: str) -> tuple[ByteSpan, int]:
    """The span and the file's size in a `Content-Range`; raises PeerProtocolError."""
    match = _CONTENT_RANGE.match(header.strip())
    if match is None:
        raise PeerProtocolError(f"Content-Range {header[:80]!r}")
    first, last, size = map(int, match.groups())
    if not first <= last < size:
        raise PeerProtocolError(f"Content-Range {header[:80]!r}")
    return ByteSpan(first, last + 1), size
