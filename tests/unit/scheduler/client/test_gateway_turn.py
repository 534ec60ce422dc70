"""The client's tokens are the turn: whatever a gateway replays, samples anew or leaves out."""

from typing import Any

import msgspec
import pytest

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
)
from harvester.platform.backoff import Interrupted
from scheduler.client.gateway_turn import GatewayTurn
from scheduler.gateway.engines.stream import EngineChunk, EventStream, _Logprobs
from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.requests import decode_generate

PROMPT = (7, 8, 9)


def opened(**sampling: object) -> tuple[Turn, GatewayTurn]:
    params = msgspec.convert({"max_tokens": 6, "seed": 3, **sampling}, SamplingParams)
    request = GenerateRequest(request_id="r", token_ids=PROMPT, sampling_params=params)
    turn = TurnLedger(JobId("job")).open(request, trajectory=TrajectoryId("t"))
    assert turn is not None
    return turn, GatewayTurn(turn, b"")


def chunk(tokens: list[int], *spans: tuple[int, int, int], **more: Any) -> EngineChunk:
    return msgspec.json.decode(encoded(tokens, *spans, **more), type=EngineChunk)


def encoded(
    tokens: list[int],
    *spans: tuple[int, int, int],
    finish: str | None = None,
    numerics: str = "x",
) -> bytes:
    """Spans are start, end and version."""
    choice = {
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": token, "logprob": -1.0} for token in tokens]},
        "finish_reason": finish,
        "spans": [
            {"start": start, "end": end, "version": v, "engine": "e0", "numerics": numerics}
            for start, end, v in spans
        ],
    }
    return msgspec.json.encode({"choices": [choice]})


def fold(at_gateway: GatewayTurn, *chunks: EngineChunk) -> None:
    at_gateway.request()
    for each in chunks:
        at_gateway.fold(each, lambda: None)


def spans_of(turn: Turn) -> list[tuple[int, int, int]]:
    return [(span.start, span.end, span.version) for span in turn.choice().spans]


def test_a_stream_is_the_turn_with_the_gateway_s_spans() -> None:
    turn, at_gateway = opened()
    first, second = chunk([1, 2], (0, 2, 1)), chunk([3, 4], (0, 3, 1), (3, 4, 2))
    fold(at_gateway, first, second, chunk([], (0, 3, 1), (3, 4, 2), finish="stop"))
    assert turn.token_ids == [1, 2, 3, 4]
    assert spans_of(turn) == [(0, 3, 1), (3, 4, 2)]
    assert turn.finish_reason is FinishReason.STOP


def test_a_last_part_that_is_longer_than_the_one_before_is_taken_once_under_its_version() -> None:
    turn, at_gateway = opened(max_tokens=20)
    fold(at_gateway, chunk(list(range(10)), (0, 10, 1)), chunk([10], (10, 11, 2)))
    at_gateway.fold(chunk([11, 12, 13], (0, 10, 1), (10, 14, 2), finish="stop"), lambda: None)
    assert turn.token_ids == list(range(14))
    assert spans_of(turn) == [(0, 10, 1), (10, 14, 2)]
    assert turn.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("known", [0, 900])
def test_a_reply_in_one_large_event_is_the_turn_with_its_spans(known: int) -> None:
    """A turn that is joined again, or answered again, comes whole: more than 64 KiB here."""
    turn, at_gateway = opened(max_tokens=3000)
    tokens = [100_000 + number for number in range(2500)]
    whole = encoded(tokens, (0, 1000, 1), (1000, 2500, 2), finish="stop")
    event = b"data: " + whole + b"\n\n"
    assert len(event) > 1 << 16
    if known:
        fold(at_gateway, chunk(tokens[:known], (0, known, 1)))
    fold(at_gateway, *EventStream().feed(event))
    assert turn.token_ids == tokens
    assert spans_of(turn) == [(0, 1000, 1), (1000, 2500, 2)]
    assert turn.ended


def test_a_turn_that_is_joined_again_is_requested_alike_and_takes_only_what_is_new() -> None:
    turn, at_gateway = opened()
    request = at_gateway.request()
    at_gateway.fold(chunk([1, 2], (0, 2, 1)), lambda: None)
    assert at_gateway.request() == request
    at_gateway.fold(chunk([1, 2, 3], (0, 3, 1), finish="stop"), lambda: None)
    assert (turn.token_ids, spans_of(turn)) == ([1, 2, 3], [(0, 3, 1)])


def test_another_turn_under_the_same_id_is_left_and_the_rest_requested_as_a_new_one() -> None:
    turn, at_gateway = opened(min_tokens=4)
    fold(at_gateway, chunk([1, 2], (0, 2, 1)))
    at_gateway.request()
    with pytest.raises(Interrupted, match="does not begin with the client's tokens"):
        at_gateway.fold(chunk([1, 5], (0, 2, 2)), lambda: None)
    rest = at_gateway.request()
    assert (rest.request_id, rest.token_ids) == ("r.rest1", (*PROMPT, 1, 2))
    assert (rest.sampling_params.max_tokens, rest.sampling_params.min_tokens) == (4, 2)
    assert rest.sampling_params.seed not in (None, 3)
    at_gateway.fold(chunk([6, 7], (0, 2, 2), finish="stop"), lambda: None)
    assert (turn.token_ids, spans_of(turn)) == ([1, 2, 6, 7], [(0, 2, 1), (2, 4, 2)])


def test_another_turn_that_ends_before_the_tokens_that_are_here_does_not_end_this_one() -> None:
    turn, at_gateway = opened()
    fold(at_gateway, chunk([1, 2], (0, 2, 1)))
    at_gateway.request()
    with pytest.raises(Interrupted):
        at_gateway.fold(chunk([1], (0, 1, 1), finish="abort"), lambda: None)
    assert not turn.ended


def test_after_an_engine_s_own_tokens_the_gateway_gets_the_rest() -> None:
    turn, at_gateway = opened()
    fold(at_gateway, chunk([1], (0, 1, 1)))
    attempt = turn.begin(engine="e1", version=WeightVersion(1), numerics="x")
    turn.accept(attempt, [2], turn.logprobs[:1])
    assert at_gateway.movable
    assert at_gateway.request().token_ids == (*PROMPT, 1, 2)


def test_a_turn_whose_sampling_counts_output_moves_to_the_gateway_only_with_its_own_tokens() -> (
    None
):
    turn, at_gateway = opened(frequency_penalty=0.5)
    fold(at_gateway, chunk([1], (0, 1, 1)))
    assert at_gateway.movable
    attempt = turn.begin(engine="e1", version=WeightVersion(1), numerics="x")
    turn.accept(attempt, [2], turn.logprobs[:1])
    assert not at_gateway.movable


def test_tokens_without_a_span_or_a_log_probability_are_refused() -> None:
    _, at_gateway = opened()
    with pytest.raises(PeerProtocolError, match="no span"):
        fold(at_gateway, chunk([1, 2], (0, 1, 1)))
    _, at_gateway = opened()
    bare = chunk([1], (0, 1, 1))
    bare.choices[0].logprobs = None
    with pytest.raises(PeerProtocolError, match="log-probs"):
        fold(at_gateway, bare)


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        ([(0, 2, 1), (1, 3, 2)], "spans overlap"),
        ([(2, 3, 2), (0, 2, 1)], "spans overlap or leave out tokens"),
        ([(0, 1, 1), (2, 3, 2), (2, 3, 2)], "leave out tokens"),
    ],
)
def test_spans_that_would_double_swap_or_drop_a_token_are_refused(
    spans: list[tuple[int, int, int]], fault: str
) -> None:
    turn, at_gateway = opened()
    with pytest.raises(PeerProtocolError, match=fault):
        fold(at_gateway, chunk([1, 2, 3], *spans))
    assert turn.token_ids == [1, 2, 3][: len(turn.token_ids)]


@pytest.mark.parametrize(
    ("token", "logprob", "fault"),
    [
        (9, -1.0, r"log-probabilities of \[9\], tokens \[1\]"),
        (1, 2.0, "a log-probability above 0"),
        (1, -9999.0, "no log-probability of a sampled token"),
    ],
)
def test_a_log_probability_of_another_token_or_of_none_is_refused(
    token: int, logprob: float, fault: str
) -> None:
    turn, at_gateway = opened()
    wrong = chunk([1], (0, 1, 1))
    wrong.choices[0].logprobs = _Logprobs([TokenLogprob(token, logprob)])
    with pytest.raises(PeerProtocolError, match=fault):
        fold(at_gateway, wrong)
    assert not turn.token_ids


def test_a_finish_reason_that_no_gateway_sends_is_the_gateway_s_fault() -> None:
    _, at_gateway = opened()
    with pytest.raises(PeerProtocolError, match="'error' is not a valid FinishReason"):
        fold(at_gateway, chunk([1], (0, 1, 1), finish="error"))


def test_a_turn_is_immovable_where_the_gateway_says_so_and_movable_where_it_does_not() -> None:
    turn, at_gateway = opened(presence_penalty=1.0)
    fold(at_gateway, chunk([1], (0, 1, 1)))
    assert turn.choice().immovable == ()
    pinned = chunk([2], (1, 2, 1))
    pinned.choices[0].immovable = ("presence_penalty",)
    at_gateway.fold(pinned, lambda: None)
    assert turn.choice().immovable == ("presence_penalty",)


def test_the_rest_of_a_turn_of_equal_numerics_is_asked_for_with_those_of_its_tokens() -> None:
    turn, _ = opened()
    request = msgspec.structs.replace(turn.request, request_id="s", equal_numerics=True)
    turn = TurnLedger(JobId("job")).open(request, trajectory=TrajectoryId("t"))
    assert turn is not None
    at_gateway = GatewayTurn(turn, b"")
    assert at_gateway.request().equal_numerics is True
    at_gateway.fold(chunk([1], (0, 1, 1), numerics="first"), lambda: None)
    with pytest.raises(Interrupted):
        fold(at_gateway, chunk([5], (0, 1, 1), numerics="second"))
    assert at_gateway.request().equal_numerics == "first"


@pytest.mark.parametrize("other", [{"version": 2}, {"numerics": "y"}], ids=["version", "numerics"])
def test_a_turn_that_was_begun_anew_elsewhere_is_another_one_though_its_tokens_are_the_same(
    other: dict[str, Any],
) -> None:
    """Greedy tokens are alike on all engines: the rest would be of other numerics than the pin's,
    or go on in spite of `return_partial`."""
    turn, at_gateway = opened()
    fold(at_gateway, chunk([1, 2], (0, 2, 1)))
    version, numerics = other.get("version", 1), other.get("numerics", "x")
    with pytest.raises(Interrupted, match="does not begin with the client's tokens"):
        fold(at_gateway, chunk([1, 2, 3], (0, 3, version), numerics=numerics))
    assert (turn.token_ids, spans_of(turn)) == ([1, 2], [(0, 2, 1)])
    assert at_gateway.request().token_ids == (*PROMPT, 1, 2)


def test_the_rests_of_turns_with_the_longest_ids_have_ids_of_their_own_that_a_gateway_takes() -> (
    None
):
    first, _ = opened()
    rests = set()
    for begins in "ab":
        request = msgspec.structs.replace(first.request, request_id=begins + "r" * 199)
        turn = TurnLedger(JobId("job")).open(request, trajectory=TrajectoryId("t"))
        assert turn is not None
        at_gateway = GatewayTurn(turn, b"")
        fold(at_gateway, chunk([1], (0, 1, 1)))
        with pytest.raises(Interrupted):
            fold(at_gateway, chunk([5], (0, 1, 2)))
        at_gateway.request()
        rests.add(decode_generate(at_gateway.body).request_id)
    assert len(rests) == 2
    assert all(rest.endswith(".rest1") for rest in rests)


def test_a_turn_that_moved_between_two_replies_is_the_same_one() -> None:
    turn, at_gateway = opened()
    fold(at_gateway, chunk([1, 2], (0, 2, 1)))
    fold(at_gateway, chunk([1, 2, 3], (0, 2, 1), (2, 3, 2), finish="stop"))
    assert (turn.token_ids, spans_of(turn)) == ([1, 2, 3], [(0, 2, 1), (2, 3, 2)])
