"""Streamed text without its stop string, and the identity of a trajectory in many dialects."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.ids import JobId
from harvester.contracts.wire.rollouts import (
    Choice,
    FinishReason,
    GenerateRequest,
    Logprobs,
    SamplingParams,
    TokenLogprob,
)
from scheduler.gateway import loop_share
from scheduler.gateway.dialects.session_names import (
    SESSION_HEADERS,
    session_header,
    session_of,
    trajectory_of,
)
from scheduler.gateway.dialects.stopped_text import StoppedText, in_parts, text_tokens, without_stop
from scheduler.gateway.dialects.text_dialect import CHAT, COMPLETION
from scheduler.gateway.dialects.text_logprobs import named_in_parts, prompt_logprobs
from scheduler.gateway.dialects.text_request import TextRequest
from scheduler.gateway.dialects.text_routes import MAX_TURNS, turns_of
from scheduler.gateway.requests import decode_generate


def turn_with(*stops: str, include: bool = False, min_tokens: int = 0) -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens=9, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    return GenerateRequest(request_id="r", token_ids=(1,), sampling_params=sampling)


def text(*stops: str, include: bool = False) -> StoppedText:
    return StoppedText(turn_with(*stops, include=include))


def sent(held: StoppedText, pieces: list[str], *, stop: str | None) -> str:
    parts = [held.feed(piece, Choice()) for piece in pieces[:-1]]
    reason = FinishReason.STOP if stop else FinishReason.LENGTH
    parts.append(held.feed(pieces[-1], Choice(finish_reason=reason, stop_reason=stop)))
    return "".join(parts)


@given(
    st.text("abE", max_size=20),
    st.sampled_from(["END", "E", "ENDE"]),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_no_character_of_a_stop_string_is_ever_sent(body: str, stop: str, cuts: list[int]) -> None:
    body = body.replace("E", "e")
    whole = body + stop
    edges = sorted({0, len(whole), *(min(cut, len(whole)) for cut in cuts)})
    pieces = [whole[a:b] for a, b in pairwise(edges)] or [whole]
    assert sent(text(stop), pieces, stop=stop) == body


def test_text_that_only_begins_like_a_stop_string_is_sent_whole() -> None:
    assert sent(text("END"), ["aE", "N", "x"], stop=None) == "aENx"
    assert sent(text("END"), ["aEN"], stop=None) == "aEN"


def test_a_stop_string_that_is_wanted_stays() -> None:
    assert sent(text("END", include=True), ["aEND"], stop=None) == "aEND"
    assert cut("aEND", "END", "END") == "a"
    assert cut("aEND", 17, "END") == "aEND"
    assert cut("foo\n\n", "\n", "\n") == "foo", "cut at the first, as vLLM does"
    assert cut("repetition", "repetition") == "repetition", "a reason, no string"


def cut(whole: str, reason: int | str, *stops: str, min_tokens: int = 0, before: str = "") -> str:
    sampling = SamplingParams(max_tokens=9, min_tokens=min_tokens, stop=stops)
    ended = Choice(stop_reason=reason)
    return without_stop(whole, ended, sampling, before_chars=len(before))


def test_a_stop_string_before_min_tokens_ends_no_text() -> None:
    """vLLM looks for them in later tokens only; one token may hold several."""
    assert cut("aXbcdX", "X", "X", min_tokens=4, before="aXbcd") == "aXbcd"
    assert cut("a\nfoo\n\n", "\n", "\n", min_tokens=2, before="a\nfoo") == "a\nfoo"
    assert cut("erererer", "er", "er", min_tokens=3, before="ererer") == "ererer"
    assert cut("erererer", "rere", "rere", min_tokens=2, before="erer") == "e"
    assert cut("aXb", "X", "X", min_tokens=1, before="aX") == "aXb", "never said by an engine"


@pytest.mark.parametrize("whole", ["ererer", "aXYbXYcd", "XYXYXY", "aXbXYX"])
@pytest.mark.parametrize("min_tokens", [1, 2, 3])
async def test_a_stream_s_last_token_says_which_stop_string_ended_it(
    whole: str, min_tokens: int
) -> None:
    """Each character is a token, all of them in one chunk."""
    turn = turn_with("er", "XY", "X", min_tokens=min_tokens)
    for end in range(1, len(whole) + 1):
        for stop in ("er", "XY", "X"):
            if not whole[:end].endswith(stop) or end <= min_tokens:
                continue
            ended = Choice(
                token_ids=tuple(map(ord, whole[:end])),
                logprobs=Logprobs(tuple(TokenLogprob(ord(each), 0.0) for each in whole[:end])),
                finish_reason=FinishReason.STOP,
                stop_reason=stop,
            )
            parts = [part async for part in in_parts(one_chunk(ended), [turn])]
            assert [token for part in parts for token in part.token_ids] == list(ended.token_ids)
            assert all(len(part.logprobs.content) == len(part.token_ids) for part in parts)
            held = StoppedText(turn)
            sent = [held.feed("".join(map(chr, part.token_ids)), part) for part in parts]
            assert "".join(sent) == whole[:end].removesuffix(stop)


async def one_chunk(choice: Choice) -> AsyncIterator[Choice]:
    yield choice


@pytest.mark.parametrize("given", ["\udcff", "a\r\nb", "r" * 500])
def test_a_reply_can_be_encoded_whatever_the_request_s_id_has(given: str) -> None:
    request = TextRequest(CHAT, JobId("job"), {"messages": []}, given)
    assert msgspec.json.encode([request.name, request.turn_name])


@pytest.mark.parametrize(
    "body",
    [
        {"messages": 5},
        {"messages": [{"role": "user", "content": [{"type": []}]}]},
    ],
)
def test_messages_of_other_types_are_the_clients_fault(body: dict[str, Any]) -> None:
    with pytest.raises(PeerProtocolError, match="messages"):
        TextRequest(CHAT, JobId("job"), body)


def test_a_last_chunk_without_text_gives_what_was_held_back() -> None:
    request = TextRequest(CHAT, JobId("job"), {"messages": []})
    held = request.stopped_texts(turn_with("</answer>"))
    chunk = {"delta": {"content": "The answer is 42."}}
    request.change_streamed(chunk, held, Choice())
    last: dict[str, Any] = {"delta": {"content": None}}
    request.change_streamed(last, held, Choice(finish_reason=FinishReason.STOP))
    assert chunk["delta"]["content"] + last["delta"]["content"] == "The answer is 42."


def test_reasoning_ends_before_its_stop_string_and_is_whole_where_content_begins() -> None:
    request = TextRequest(CHAT, JobId("job"), {"messages": []})
    ended = Choice(token_ids=(1,), finish_reason=FinishReason.STOP, stop_reason="END")
    message = {"reasoning": "so itEND", "content": ""}
    request.end_text({"message": message}, ended, turn_with("END"))
    assert message == {"reasoning": "so it", "content": ""}
    held, made = request.stopped_texts(turn_with("END")), {"reasoning": "", "content": ""}
    deltas: list[dict[str, Any]] = [
        {"reasoning": "it is E"},
        {"content": "so "},
        {"content": "beEND"},
    ]
    for delta in deltas:
        request.change_streamed({"delta": delta}, held, ended if delta is deltas[-1] else Choice())
        for name in made:
            made[name] += delta.get(name) or ""
    assert made == {"reasoning": "it is E", "content": "so be"}


@pytest.mark.parametrize(
    ("finish", "stop", "include", "kept"),
    [
        (FinishReason.STOP, None, False, 2),
        (FinishReason.STOP, 9, False, 2),
        (FinishReason.STOP, "x", False, 3),
        (FinishReason.STOP, None, True, 3),
        (FinishReason.LENGTH, None, False, 3),
        (None, None, False, 3),
    ],
)
def test_the_token_that_ends_a_turn_is_not_part_of_its_text(finish, stop, include, kept) -> None:
    sampling = SamplingParams(max_tokens=9, include_stop_str_in_output=include)
    turn = GenerateRequest(request_id="r", token_ids=(1,), sampling_params=sampling)
    choice = Choice(token_ids=(5, 6, 7), finish_reason=finish, stop_reason=stop)
    assert text_tokens(choice, turn) == kept


def test_an_answer_of_its_stop_token_alone_is_an_empty_text() -> None:
    request = TextRequest(COMPLETION, JobId("job"), {"prompt": "x"})
    turn = GenerateRequest(
        request_id="r", token_ids=(1,), sampling_params=SamplingParams(max_tokens=9)
    )
    choice = Choice(token_ids=(2,), finish_reason=FinishReason.STOP, stop_reason=2)
    assert request.engine_choice(choice, turn, 0)["token_ids"], "vLLM renders no empty choice"
    told = {"text": "<eos>"}
    request.end_text(told, choice, turn)
    assert told["text"] == ""


async def test_a_request_asks_for_no_more_turns_than_the_queue_holds() -> None:
    sampling = SamplingParams(max_tokens=1, n=1024)
    prompt = GenerateRequest(request_id="r", token_ids=(1,), sampling_params=sampling)
    assert len(await turns_of([prompt] * 16)) == MAX_TURNS
    with pytest.raises(PeerProtocolError, match="samples"):
        await turns_of([prompt] * 17)


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_a_trajectory_is_named_by_any_framework_s_header(header: str) -> None:
    request = make_mocked_request("POST", "/", headers={header: "episode-7"})
    assert trajectory_of(request, "r", "ignored") == "episode-7"


def test_a_session_in_the_body_or_the_request_itself_names_it_else() -> None:
    request = make_mocked_request("POST", "/")
    assert trajectory_of(request, "r", "s") == "s"
    assert trajectory_of(request, "r") == "r"


def test_the_first_header_that_names_a_session_counts_and_an_empty_one_names_none() -> None:
    headers = {"X-SMG-Routing-Key": "key", "X-Session-ID": "", "Session-ID": "last"}
    assert session_header(make_mocked_request("POST", "/", headers=headers)) == "key"
    assert session_header(make_mocked_request("POST", "/", headers={"X-User-ID": "u"})) is None


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({"session_id": "a", "routing_key": "b"}, "a"),
        ({"routing_key": "b", "program_id": "c"}, "b"),
        ({"program_id": "c"}, "c"),
        ({"session_params": {"session_id": "d"}}, "d"),
        ({"session_params": {"id": "e"}}, None),
        ({"session_params": "f"}, None),
        ({"user": "u"}, None),
    ],
)
def test_a_body_names_its_session_as_frameworks_do(
    body: dict[str, Any], session: str | None
) -> None:
    assert session_of(body) == session


def test_a_session_in_the_body_that_is_no_string_is_refused_by_its_name() -> None:
    with pytest.raises(PeerProtocolError, match="program_id"):
        session_of({"program_id": 7})


def test_a_field_that_vllm_leaves_out_of_a_rendered_request_has_its_own_default() -> None:
    asked = TextRequest(COMPLETION, JobId("job"), {"prompt": "a"})
    rendered = {"token_ids": [1], "sampling_params": {"temperature": 0.5}}
    body = decode_generate(asked.generate(rendered, 0))
    assert (body.sampling_params.max_tokens, body.sampling_params.logprobs) == (16, None)


@pytest.mark.parametrize("tokens", [1, 10_000])
async def test_each_token_has_the_name_that_older_vllm_gives_it(tokens: int) -> None:
    candidates = (TokenLogprob(7, -0.5), TokenLogprob(8, -1.5))
    content = (TokenLogprob(7, -0.5, candidates),) * tokens
    choice = Choice(index=3, token_ids=(7,) * tokens, logprobs=Logprobs(content))
    pair = tuple(
        TokenLogprob(one, at, token=f"token_id:{one}") for one, at in ((7, -0.5), (8, -1.5))
    )
    told = TokenLogprob(7, -0.5, pair, "token_id:7")
    reply = msgspec.json.encode(await named_in_parts(choice))
    assert msgspec.json.decode(reply, type=Choice) == msgspec.structs.replace(
        choice, logprobs=Logprobs((told,) * tokens)
    )


async def test_the_tokens_of_a_long_choice_are_encoded_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_share, "_HELD_S", 0.0)
    content = (TokenLogprob(7, -0.5),) * 5000
    choice = Choice(token_ids=(7,) * 5000, logprobs=Logprobs(content))
    work, passes = asyncio.create_task(named_in_parts(choice)), 0
    while not work.done():
        await asyncio.sleep(0)
        passes += 1
    assert passes > 1000


@pytest.mark.parametrize(
    "raw", [b"[", b"[null]", b'[null, {"9": {"logprob": -1}}]', b"[null, null]", b'"\xff"']
)
async def test_scores_of_another_prompt_are_the_engine_s_fault(raw: bytes) -> None:
    with pytest.raises(Exhausted, match="scores"):
        await prompt_logprobs({"prompt_logprobs": msgspec.Raw(raw)}, (1, 2))
    good = msgspec.Raw(b'[null, {"2": {"logprob": -1.5, "rank": 1}}]')
    assert (await prompt_logprobs({"prompt_logprobs": good}, (1, 2)))[1]


def test_a_request_s_id_that_every_chunk_would_repeat_has_a_bound() -> None:
    body = {"messages": [], "request_id": "x" * 8193}
    with pytest.raises(PeerProtocolError, match="request_id: use at most 8192 characters"):
        TextRequest(CHAT, JobId("job"), body)
