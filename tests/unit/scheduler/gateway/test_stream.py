"""An engine's event stream, however the network cuts it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.wire.rollouts import TokenLogprob
from scheduler.gateway.stream import MAX_EVENT_BYTES, EventStream


def _event(token: int) -> bytes:
    content = [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []}]
    choice = {"index": 0, "token_ids": [token], "logprobs": {"content": content}, "text": None}
    return b"data: " + msgspec.json.encode({"choices": [choice], "usage": None}) + b"\n\n"


@given(tokens=st.lists(st.integers(0, 1000), max_size=8), cuts=st.lists(st.integers(1, 40)))
def test_gives_the_same_tokens_however_the_bytes_are_cut(tokens, cuts) -> None:
    raw = b": comment\n\n" + b"".join(map(_event, tokens)) + b"data: [DONE]\n\n"
    stream, got = EventStream(), []
    while raw:
        size = cuts.pop() if cuts else len(raw)
        part, raw = raw[:size], raw[size:]
        for chunk in stream.feed(part):
            got += chunk.choices[0].token_ids or []
    assert got == tokens
    assert stream.done


def test_an_error_event_is_a_chunk_with_an_error() -> None:
    (chunk,) = EventStream().feed(b'data: {"error": {"message": "boom"}}\n\n')
    assert chunk.fault == "boom"
    (chunk,) = EventStream().feed(b'data: {"error": {"message": "", "code": 400}}\n\n')
    assert chunk.fault, "an error without words is one"
    (chunk,) = EventStream().feed(b'data: {"error": null, "choices": []}\n\n')
    assert chunk.fault == ""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (b'{"message": "out of vocabulary", "code": 400}', 400),
        (b'{"message": "boom"}', 500),
        (b'{"message": "boom", "code": "x"}', 500),
        (b'"boom"', 500),
        (b'{"code": "\xff"}', 500),
    ],
)
def test_an_error_has_the_status_that_it_says_or_is_the_engines(error: bytes, status: int) -> None:
    (chunk,) = EventStream().feed(b'data: {"error": ' + error + b"}\n\n")
    assert chunk.fault_status == status


@pytest.mark.parametrize(
    "raw",
    [
        b"data: {]\n\n",
        b'data: {"choices": [{"token_ids": ["x"]}]}\n\n',
        b'data: {"choices": [{"finish_reason": "\xff"}]}\n\n',
        b'data: {"choices": ' + b"[" * 100_000 + b"\n\n",
    ],
)
def test_nonsense_is_the_peers_fault(raw: bytes) -> None:
    with pytest.raises(PeerProtocolError, match="unreadable"):
        list(EventStream().feed(raw))


@pytest.mark.parametrize("content", [[{"token_id": 7, "logprob": -1.0}], [{"logprob": -1.0}]])
def test_a_choice_that_was_not_requested_is_the_peers_fault(content) -> None:
    choice = {"index": 1, "token_ids": [7], "logprobs": {"content": content}}
    event = b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"
    with pytest.raises(PeerProtocolError, match="choice 1"):
        list(EventStream().feed(event))


def test_an_endless_event_is_refused() -> None:
    stream = EventStream()
    for _ in range(MAX_EVENT_BYTES >> 20):
        assert list(stream.feed(b"x" * (1 << 20))) == []
    with pytest.raises(PeerProtocolError, match="more than"):
        list(stream.feed(b"x"))


def test_an_older_engine_names_tokens_by_their_place() -> None:
    content = [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:9", "logprob": -1.5}]
    choice = {"token_ids": [7, 9], "logprobs": {"content": content}, "finish_reason": None}
    event = b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"
    (chunk,) = EventStream().feed(event)
    (read,) = chunk.choices
    assert read.logprobs is not None
    assert read.logprobs.content == [TokenLogprob(7, -0.5), TokenLogprob(9, -1.5)]
    assert read.token_ids == [7, 9]


def test_log_probabilities_of_other_tokens_are_refused() -> None:
    choice = {"token_ids": [7, 9], "logprobs": {"content": [{"logprob": -0.5}]}}
    event = b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"
    with pytest.raises(PeerProtocolError, match="1 log-probabilities, 2 tokens"):
        list(EventStream().feed(event))
