"""HTTP range headers, read strictly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import PeerProtocolError
from weightsync.transport.ranges import (
    ByteSpan,
    answered_span,
    content_range,
    range_header,
    requested_span,
)


@given(st.integers(1, 1 << 40), st.data())
def test_a_range_header_survives_the_round_trip(size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size - 1))
    span = ByteSpan(start, data.draw(st.integers(start + 1, size)))
    assert requested_span(range_header(span), size) == span
    assert answered_span(content_range(span, size)) == (span, size)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_pieces_are_the_span_in_order(start: int, size: int, piece_bytes: int) -> None:
    pieces = list(ByteSpan(start, start + size).pieces(piece_bytes))
    assert [at for piece in pieces for at in range(piece.start, piece.stop)] == list(
        range(start, start + size)
    )
    assert all(0 < piece.size_bytes <= piece_bytes for piece in pieces)


@pytest.mark.parametrize(
    ("header", "span"),
    [
        (None, ByteSpan(0, 100)),
        ("bytes=0-0", ByteSpan(0, 1)),
        ("bytes=90-", ByteSpan(90, 100)),
        ("bytes=90-2000", ByteSpan(90, 100)),
        ("bytes=-7", ByteSpan(93, 100)),
        ("bytes=-700", ByteSpan(0, 100)),
        ("bytes=100-", None),
        ("bytes=5-4", None),
        ("bytes=-0", None),
        ("bytes=-", None),
        ("bytes=0-1,5-6", None),
        ("chunks=0-1", None),
        ("bytes=٣-4", None),
        ("bytes=0-" + "9" * 40, None),
    ],
)
def test_a_request_s_range_is_one_or_none(header: str | None, span: ByteSpan | None) -> None:
    assert requested_span(header, 100) == span


@pytest.mark.parametrize(
    "header",
    ["", "bytes 0-9/*", "bytes 5-4/10", "bytes 0-10/10", "bytes */10", "0-9/10", "x" * 999],
)
def test_an_answer_s_range_is_exact(header: str) -> None:
    with pytest.raises(PeerProtocolError, match="Content-Range"):
        answered_span(header)
