"""Calls of a renderer that comes and goes."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from harvester.contracts.errors import Exhausted
from scheduler.gateway.dialects.renderer import (
    RenderEndpoint,
    Renderer,
    RendererFault,
    RenderRefused,
    StreamedText,
)
from scheduler.gateway.dialects.text_dialect import CHAT, COMPLETION, Dialect
from scheduler.gateway.engines.engine_connections import ConnectionFailed
from scheduler.gateway.settings import Timeouts

PATIENCE_S = 1.0


class FlappingPeer:
    """Answers each third call; it cannot be reached before."""

    url = "http://renderer"

    def __init__(self, *, every: int = 3) -> None:
        self._every = every
        self.calls = 0

    async def post(self, *_: object) -> Any:
        self.calls += 1
        if self.calls % self._every:
            raise ConnectionFailed(111, "refused")

        async def read_most(_most_bytes: int) -> bytes:
            return b"{}"

        return SimpleNamespace(status=200, read_most=read_most, close=lambda: None)


class ShortPeer:
    """Renders no prompt whole: it is too long for its context, or wrong everywhere."""

    url = "http://short"

    def __init__(
        self,
        message: str = "This model's maximum context length is 256 tokens.",
        *,
        status: int = 400,
    ) -> None:
        self._message, self._status = message, status

    async def post(self, *_: object) -> Any:
        async def read_most(_most_bytes: int) -> bytes:
            return self._message.encode()

        return SimpleNamespace(status=self._status, read_most=read_most, close=lambda: None)


def renderer_of(*peers: FlappingPeer | ShortPeer) -> Renderer:
    endpoints = [
        RenderEndpoint(cast(Any, each), 256 * isinstance(each, ShortPeer)) for each in peers
    ]
    return renderer_at(*endpoints)


def renderer_at(*endpoints: RenderEndpoint) -> Renderer:
    given: Any = SimpleNamespace(in_order=lambda: endpoints)
    return Renderer(given, Timeouts(queue_s=PATIENCE_S))


async def test_a_call_waits_anew_where_the_renderer_was_back_for_others() -> None:
    renderer = renderer_of(FlappingPeer())
    async with asyncio.timeout(30):
        replies = await asyncio.gather(*(renderer.post("/tokenize", {}) for _ in range(16)))
    assert replies == [{}] * 16


async def test_a_call_gives_up_after_its_patience_with_an_absent_renderer() -> None:
    peer = FlappingPeer(every=1000)
    renderer = renderer_of(peer)
    calls = [renderer.post("/tokenize", {}) for _ in range(100)]
    async with asyncio.timeout(30):
        replies = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(reply) for reply in replies} == {Exhausted}
    # One call looks for all of them.
    assert peer.calls <= 100 + 11


@pytest.mark.parametrize("gone", [0, 1])
async def test_a_call_that_is_given_up_while_it_looks_hands_over_to_the_next(gone: int) -> None:
    renderer = renderer_of(FlappingPeer())
    calls = [asyncio.create_task(renderer.post("/tokenize", {})) for _ in range(2)]
    await asyncio.sleep(0)
    calls[gone].cancel()
    assert await calls[1 - gone] == {}


async def test_a_text_is_tokenised_while_thousands_of_another_request_wait() -> None:
    class Waiting(FlappingPeer):
        async def post(self, _path: str, data: bytes, _headers: object) -> Any:
            if b"many" in data:
                await asyncio.sleep(3600)

            async def read_most(_most_bytes: int) -> bytes:
                return b'{"tokens": [7]}'

            return SimpleNamespace(status=200, read_most=read_most, close=lambda: None)

    renderer = renderer_of(Waiting())
    many = asyncio.create_task(renderer.tokenize(["many"] * 4096))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        assert await renderer.tokenize(["one"]) == [[7]]
    many.cancel()


async def test_a_request_that_is_too_long_for_one_renderer_waits_for_a_longer_one() -> None:
    renderer = renderer_of(FlappingPeer(), ShortPeer())
    assert await renderer.post("/v1/completions/render", {}) == {}


@pytest.mark.parametrize("asked", [255, 254])
async def test_a_prompt_whose_output_was_cut_to_a_short_context_is_rendered_by_a_longer_one(
    asked: int,
) -> None:
    rendered = {"token_ids": [7], "sampling_params": {"max_tokens": asked}}
    short = ShortPeer(msgspec.json.encode([rendered]).decode(), status=200)
    found = await renderer_of(FlappingPeer(), short).post("/v1/completions/render", {})
    assert found == ({} if asked == 255 else [rendered])


async def test_a_request_is_refused_in_the_words_of_the_longest_renderer() -> None:
    alone = renderer_at(RenderEndpoint(cast(Any, ShortPeer())))
    wrong = renderer_of(FlappingPeer(every=1000), ShortPeer("temperature must be non-negative"))
    for renderer, words in ((alone, "context length"), (wrong, "temperature")):
        with pytest.raises(RenderRefused, match=words):
            await renderer.post("/v1/completions/render", {})


async def test_a_request_that_is_too_long_for_all_gives_up_with_the_words_of_one() -> None:
    renderer = renderer_of(FlappingPeer(every=1000), ShortPeer())
    with pytest.raises(Exhausted, match="context length is 256"):
        await renderer.post("/v1/completions/render", {})


@pytest.mark.parametrize("dialect", [CHAT, COMPLETION])
@pytest.mark.parametrize("answer", ["{}", "[{}]", '{"token_ids": [1]}', "7", "{"])
async def test_a_render_reply_without_its_fields_is_the_renderer_s_fault(
    dialect: Dialect, answer: str
) -> None:
    hollow = ShortPeer(answer, status=200)
    with pytest.raises(RendererFault, match=r"http://short/v1/.*/render: "):
        await renderer_of(hollow).render(dialect, {})
    with pytest.raises(RendererFault, match="http://short/tokenize: "):
        await renderer_of(hollow).tokenize(["one"])


async def test_a_reply_larger_than_is_taken_is_refused_with_its_size_and_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler.gateway.dialects.renderer._MOST_BYTES", 100)
    large, other = ShortPeer("[" * 200, status=200), ShortPeer("[" * 200, status=200)
    with pytest.raises(RendererFault, match="a reply of more than 100 bytes; request less"):
        await renderer_of(large, other).post("/v1/completions/render", {})


async def test_a_fault_of_is_made_good_by_the_next_renderer() -> None:
    rendered = {"token_ids": [7], "sampling_params": {"max_tokens": 1}}
    whole = ShortPeer(msgspec.json.encode(rendered).decode(), status=200)
    assert await renderer_of(ShortPeer("{}", status=200), whole).render(CHAT, {}) == [rendered]


class DecodingPeer:
    """Gives each choice back as its text."""

    url = "http://decoding"

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    async def post(self, _path: str, data: bytes, _headers: object) -> Any:
        self.bodies.append(body := msgspec.json.decode(data))
        told = [each for one in body["generate_responses"] for each in one["choices"]]

        async def read_most(_most_bytes: int) -> bytes:
            return msgspec.json.encode({"choices": told, "created": len(self.bodies)})

        return SimpleNamespace(status=200, read_most=read_most, close=lambda: None)


async def test_many_large_completions_are_several_calls_in_their_order() -> None:
    peer = DecodingPeer()
    renderer = renderer_at(RenderEndpoint(cast(Any, peer)))
    responses = [{"choices": [{"text": f"{at}" + "x" * (1 << 20)}]} for at in range(10)]
    prompts = [tuple(range(at, at + 100)) for at in range(10)]
    request = {"prompt": ["a long list"], "logprobs": 1}
    reply = await renderer.derender(COMPLETION, request, prompts, iter(responses))
    assert [each["text"].strip("x") for each in reply["choices"]] == [str(at) for at in range(10)]
    assert [len(body["generate_responses"]) for body in peer.bodies] == [3, 3, 3, 1]
    seeds = [seed for body in peer.bodies for seed in body["prompt_token_ids"]]
    assert seeds == [list(prompt[-64:]) for prompt in prompts]
    assert all(
        body["prompt_tokens"] == [100] * len(body["prompt_token_ids"]) for body in peer.bodies
    )
    assert {body["completion_request"]["prompt"] for body in peer.bodies} == {" "}
    assert {body["completion_request"]["logprobs"] for body in peer.bodies} == {1}
    await renderer.derender(COMPLETION, request, prompts[:2], iter(responses[:2]))
    assert peer.bodies[-1]["completion_request"] == request, "one call is as it was"


async def test_log_probabilities_of_a_parsed_chunk_cost_neither_prompt_nor_tools() -> None:
    bodies: list[Any] = []
    content = [{"token_id": 9, "token": "", "logprob": -1.0, "top_logprobs": []}]
    choice = {"index": 0, "token_ids": [9], "logprobs": {"content": content}}

    class ParsingPeer(FlappingPeer):
        async def post(self, _path: str, data: bytes, _headers: object) -> Any:
            bodies.append(body := msgspec.json.decode(data))
            told: dict[str, Any] = {"chunk": {"choices": [{"index": 0}]}, "stream_state": None}
            if "generate_response" in body:
                told = {"choices": body["generate_response"]["choices"]}

            async def read_most(_most_bytes: int) -> bytes:
                return msgspec.json.encode(told)

            return SimpleNamespace(status=200, read_most=read_most, close=lambda: None)

    prompt = tuple(range(10_000))
    request = {"messages": [{"role": "user", "content": "x" * 10_000}], "tools": [{}]}
    text = StreamedText(CHAT, request, prompt)
    chunk, state = {"request_id": "r", "choices": [choice]}, {"output_token_ids": [1, 2, 3, 4, 5]}
    told, _ = await renderer_of(ParsingPeer()).derender_chunk(text, prompt, chunk, state)
    assert told["choices"][0]["logprobs"]["content"] == content
    streamed, scored = bodies
    assert len(streamed["prompt_token_ids"]) == len(prompt)
    assert scored["generate_response"]["choices"][0]["token_ids"] == [2, 3, 4, 5, 9]
    assert scored["chat_request"] == {"messages": []}
    assert len(scored["prompt_token_ids"]) == 64
