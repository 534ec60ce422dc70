"""Requests and replies of benchmarks.gateway: in any portions, and every token accounted for."""

import pytest

from benchmarks.gateway.dialects import (
    COMPLETIONS,
    GENERATE,
    SGLANG,
    AnyRequest,
    TurnRoute,
    ids_of_reply,
    request_bytes,
)
from benchmarks.gateway.http_messages import ReplyReader, RequestReader
from benchmarks.gateway.stub_engine import chunk, streamed, whole

ROUTES = pytest.mark.parametrize("route", [GENERATE, COMPLETIONS, SGLANG], ids=lambda r: r.path)


def read_reply(data: bytes, *, portion: int) -> ReplyReader:
    reply = ReplyReader.empty()
    for at in range(0, len(data), portion):
        assert not reply.whole
        reply.feed(data[at : at + portion])
    return reply


@ROUTES
@pytest.mark.parametrize("portion", [1, 7, 100_000])
def test_reads_requests_in_any_portions(route: TurnRoute, portion: int) -> None:
    sent = [
        request_bytes(route, number=number, tokens=5, stream=False, port=1) for number in (3, 4)
    ]
    reader, data = RequestReader(), b"".join(sent)
    found = [
        one for at in range(0, len(data), portion) for one in reader.feed(data[at : at + portion])
    ]
    requests = [AnyRequest.of(body) for _, body in found]
    assert [path.decode() for path, _ in found] == [route.path] * 2
    assert [(request.number, request.tokens) for request in requests] == [(3, 5), (4, 5)]


@ROUTES
@pytest.mark.parametrize("portion", [1, 7, 100_000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_of_the_stub_has_its_tokens_in_order(
    route: TurnRoute, portion: int, stream: bool
) -> None:
    reply = read_reply((streamed if stream else whole)(route, 12), portion=portion)
    assert ids_of_reply(route, reply, stream=stream) == list(range(1, 13))


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS], ids=lambda route: route.path)
def test_a_lost_token_shows(route: TurnRoute) -> None:
    lost = chunk(route, 2, 3)
    reply = read_reply(streamed(route, 3).replace(lost, b""), portion=1000)
    assert ids_of_reply(route, reply, stream=True) == [1, 3]


def test_a_token_that_is_lost_from_a_stream_of_all_tokens_so_far_shows() -> None:
    """The event before the last one may be missing, a token of it not."""
    skipped = streamed(SGLANG, 3).replace(chunk(SGLANG, 2, 3), b"")
    assert ids_of_reply(SGLANG, read_reply(skipped, portion=1000), stream=True) == [1, 2, 3]
    lost = streamed(SGLANG, 3).replace(b'"output_ids":[1,2,3]', b'"output_ids":[1,3,0]')
    with pytest.raises(ValueError, match="became"):
        ids_of_reply(SGLANG, read_reply(lost, portion=1000), stream=True)


def test_a_reply_that_breaks_off_is_refused() -> None:
    reply = read_reply(streamed(GENERATE, 3)[:-20], portion=1000)
    with pytest.raises(ValueError, match="ends early"):
        ids_of_reply(GENERATE, reply, stream=True)


def test_an_error_is_no_reply() -> None:
    reply = read_reply(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull", portion=3)
    with pytest.raises(ValueError, match="HTTP 503: full"):
        ids_of_reply(GENERATE, reply, stream=False)


def test_another_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="HTTP/2"):
        list(RequestReader().feed(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
