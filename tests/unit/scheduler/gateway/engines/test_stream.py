"""An engine's event stream, however the network cuts it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.wire.rollouts import TokenLogprob
from scheduler.gateway.engines.stream import MAX_EVENT_BYTES, EventStream


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


@pytest.mark.parametrize("before", [b": ping\n", b": ping - 1\r\n\r\n", b":\n:\n", b"\n"])
def test_a_comment_that_a_proxy_puts_before_an_event_costs_no_token(before: bytes) -> None:
    """A token that is missing in the middle of an output shows nowhere."""
    raw = _event(1) + before + _event(2) + _event(3).replace(b"data: ", b"data:")
    assert [chunk.choices[0].token_ids for chunk in EventStream().feed(raw)] == [[1], [2], [3]]


@pytest.mark.parametrize(
    "event",
    [
        b"event: message\n" + _event(2),
        b"\xef\xbb\xbf" + _event(2),
        b"id: 2\n\n",
        _event(2)[:-2] + b"\n" + _event(3),
        _event(2).replace(b'"choices": [', b'"choices": [{},').replace(b"[{", b"[{},{", 1),
    ],
)
def test_an_event_that_is_no_chunk_is_a_broken_stream(event: bytes) -> None:
    stream = EventStream()
    assert [chunk.choices[0].token_ids for chunk in stream.feed(_event(1))] == [[1]]
    with pytest.raises(PeerProtocolError):
        list(stream.feed(event))


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
    with pytest.raises(PeerProtocolError, match="1 log-probabilities for 2 tokens"):
        list(EventStream().feed(event))


def _large(tokens: int, **more: Any) -> bytes:
    content = [
        {"token_id": at, "logprob": -0.5, "rank": 1, "text": "x" * 40} for at in range(tokens)
    ]
    choice = {"token_ids": list(range(tokens)), "logprobs": {"content": content}, **more}
    return b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"


def test_a_large_event_comes_in_parts_of_which_the_last_ends_the_choice() -> None:
    masks = [[at, at + 1] for at in range(5000)]
    event = _large(5000, finish_reason="stop", stop_reason=7, sampling_mask=masks)
    read = [choice for chunk in EventStream().feed(event) for choice in chunk.choices]
    assert len(read) > 10
    assert [token for each in read for token in each.token_ids or ()] == list(range(5000))
    logprobs = [one for each in read if each.logprobs for one in each.logprobs.content or ()]
    assert logprobs == [TokenLogprob(at, -0.5) for at in range(5000)]
    assert [list(one) for each in read for one in each.sampling_mask or ()] == masks
    ends = [(each.finish_reason, each.stop_reason) for each in read]
    assert ends == [(None, None)] * (len(read) - 1) + [("stop", 7)]


def test_a_large_event_without_tokens_or_with_an_error_is_one_chunk() -> None:
    told = {"token_ids": [], "finish_reason": "stop", "routed_experts": "x" * 100_000}
    (chunk,) = EventStream().feed(b"data: " + msgspec.json.encode({"choices": [told]}) + b"\n\n")
    assert (chunk.choices[0].finish_reason, chunk.choices[0].token_ids) == ("stop", [])
    assert chunk.choices[0].routed_experts == "x" * 100_000
    error = {"message": "boom" * 50_000, "code": 400}
    (chunk,) = EventStream().feed(b"data: " + msgspec.json.encode({"error": error}) + b"\n\n")
    assert (chunk.fault[:4], chunk.fault_status) == ("boom", 400)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (_large(5000), "4999 tokens that are left"),
        (_large(5000, token_ids=[1] * 60_000), "4999 tokens that are left"),
        (_large(4999, token_ids=[1]), "bytes for 1 tokens"),
        (_large(4999, token_ids=[1] * 4000), "4999 log-probabilities for 4000 tokens"),
        (_large(4999, sampling_mask=[[1]]), "1 sampling masks for 4999 tokens"),
        (_large(4999, logprobs={"content": [7] * 4999}, token_ids=["x" * 70_000]), "unreadable"),
        (_large(4999, index=1), "choice 1"),
    ],
)
def test_a_large_event_that_cannot_be_right_gives_no_token(event: bytes, why: str) -> None:
    with pytest.raises(PeerProtocolError, match=why):
        next(EventStream(most_tokens=4999).feed(event))
