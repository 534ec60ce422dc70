"""OpenAI's own client and SGLang's route at one gateway over fake engines."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from aiohttp import web

from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import GatewayInProcess, Site, continued, gateway_on


def text_of(token_ids: list[int]) -> str:
    return "".join(chr(0x100 + token) for token in token_ids)


def sampling_of(body: dict[str, Any]) -> dict[str, Any]:
    """As vLLM renders it: every field, with the values that only it understands."""
    return {
        "max_tokens": body.get("max_tokens") or 8,
        "n": body.get("n") or 1,
        "temperature": 1.0,
        "seed": body.get("seed"),
        "logprobs": 1 if body.get("logprobs") else None,
        "stop": body.get("stop") or [],
        "skip_clone": True,
        "output_kind": 2,
        "output_text_buffer_length": 3,
    }


class FakeRenderer:
    """vLLM's render and derender routes, on text that is one character a token."""

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/chat/completions/render", self.render_chat),
                web.post("/v1/completions/render", self.render_completion),
                web.post("/v1/chat/completions/derender", self.derender_chat),
                web.post("/v1/completions/derender", self.derender_completion),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
            ]
        )
        return app

    async def render_chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("temperature", 0) < 0:
            error = {"message": "temperature must be non-negative", "code": 400}
            return web.json_response({"error": error}, status=400)
        ids = [ord(c) % 256 for message in body["messages"] for c in message["content"]]
        return web.json_response({"token_ids": ids, "sampling_params": sampling_of(body)})

    async def render_completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        return web.json_response(
            [
                {"token_ids": [ord(c) % 256 for c in each], "sampling_params": sampling_of(body)}
                for each in prompts
            ]
        )

    async def derender_chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("stream"):
            (choice,) = body["generate_chunk"]["choices"]
            seen = (body["stream_state"] or {"seen": 0})["seen"] + len(choice["token_ids"])
            delta = {"content": text_of(choice["token_ids"])}
            told = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}
            return web.json_response(
                {
                    "chunk": {"object": "chat.completion.chunk", "created": 1, "choices": [told]},
                    "stream_state": {"seen": seen},
                }
            )
        choices = [
            {
                "index": choice["index"],
                "message": {"role": "assistant", "content": text_of(choice["token_ids"])},
                "finish_reason": choice["finish_reason"],
            }
            for choice in body["generate_response"]["choices"]
        ]
        return web.json_response({"object": "chat.completion", "created": 1, "choices": choices})

    async def derender_completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        told = [each for one in body["generate_responses"] for each in one["choices"]]
        choices = [
            {
                "index": at,
                "text": text_of(each["token_ids"]),
                "finish_reason": each["finish_reason"],
            }
            for at, each in enumerate(told)
        ]
        return web.json_response({"object": "text_completion", "created": 1, "choices": choices})

    async def tokenize(self, request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        return web.json_response({"tokens": [ord(c) % 256 for c in prompt]})

    async def detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": text_of((await request.json())["tokens"])})


@asynccontextmanager
async def served() -> AsyncIterator[tuple[GatewayInProcess, openai.AsyncOpenAI]]:
    renderer = Site()
    await renderer.serve(FakeRenderer().app())
    engines = [FakeEngine(step_s=0.001, epoch=None) for _ in range(2)]
    try:
        async with gateway_on(*engines, renderers=[renderer.url]) as gateway:
            client = openai.AsyncOpenAI(
                base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=10
            )
            async with client:
                yield gateway, client
    finally:
        await renderer.close()


HELLO = [{"role": "user", "content": "hello"}]
IDS = [ord(c) for c in "hello"]


async def test_chat_gives_text_ids_and_spans_of_every_sample() -> None:
    async with served() as (_, client):
        reply = await client.chat.completions.create(
            model="job", messages=HELLO, max_tokens=6, n=3, extra_body={"return_token_ids": True}
        )
    told = reply.model_dump()
    wanted = continued(IDS, 6, version=0)
    assert [choice["message"]["content"] for choice in told["choices"]] == [text_of(wanted)] * 3
    assert [choice["token_ids"] for choice in told["choices"]] == [wanted] * 3
    assert told["prompt_token_ids"] == IDS
    assert all(choice["spans"][0]["version"] == 0 for choice in told["choices"])
    assert told["choices"][0]["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert (told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"]) == (5, 18)


async def test_completions_answer_prompts_and_samples_in_order() -> None:
    async with served() as (_, client):
        reply = await client.completions.create(
            model="job", prompt=["hello", "world"], max_tokens=4, n=2
        )
    wanted = [
        text_of(continued([ord(c) for c in each], 4, version=0)) for each in ("hello", "world")
    ]
    assert [choice.text for choice in reply.choices] == [wanted[0]] * 2 + [wanted[1]] * 2
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]


async def test_a_stream_carries_the_same_text_and_ends_with_usage() -> None:
    text, ends, usage = "", [], None
    async with served() as (_, client):
        chunks = await client.chat.completions.create(
            model="job",
            messages=HELLO,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in chunks:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
            usage = chunk.usage or usage
    assert text == text_of(continued(IDS, 9, version=0))
    assert ends == ["length"]
    assert usage is not None
    assert usage.completion_tokens == 9


async def test_faults_have_openai_s_form_whoever_finds_them() -> None:
    async with served() as (_, client):
        with pytest.raises(openai.BadRequestError, match="is not what job job trains"):
            await client.chat.completions.create(model="other", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="must be non-negative"):
            await client.chat.completions.create(model="job", messages=HELLO, temperature=-1)
        models = [model.id async for model in client.models.list()]
    assert "job" in models


async def test_a_request_without_a_renderer_says_what_is_missing() -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with gateway_on(engine, renderers=["http://127.0.0.1:9"]) as gateway:
        status, told = await gateway.post("/v1/chat/completions", {"messages": HELLO})
    assert status == 503
    assert "cannot be rendered" in told["error"]["message"]


async def test_sglang_s_clients_get_ids_in_its_form() -> None:
    async with served() as (gateway, _):
        body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 5}, "return_logprob": True}
        status, told = await gateway.post("/generate", body)
        many, listed = await gateway.post(
            "/generate", {"text": ["hello", "world"], "sampling_params": {"max_new_tokens": 3}}
        )
        refused, why = await gateway.post("/generate", {"input_ids": IDS, "image_data": ["x"]})
        for wrong in (
            {"top_logprobs_num": "x"},
            {"rid": ["a"]},
            {"sampling_params": []},
            {"text": 5},
        ):
            assert (await gateway.post("/generate", {"input_ids": IDS} | wrong))[0] == 400
    wanted = continued(IDS, 5, version=0)
    assert (status, told["output_ids"]) == (200, wanted)
    assert told["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert [entry[1] for entry in told["meta_info"]["output_token_logprobs"]] == wanted
    assert told["meta_info"]["weight_version"] == "0"
    assert many == 200
    assert [each["text"] for each in listed] == [
        text_of(continued([ord(c) for c in each], 3, version=0)) for each in ("hello", "world")
    ]
    assert refused == 400
    assert "image_data" in why["error"]


async def test_vllm_s_route_fans_samples_out_and_counts_tokens() -> None:
    async with served() as (gateway, _):
        body = {
            "request_id": "r",
            "token_ids": IDS,
            "sampling_params": {"max_tokens": 4, "n": 2, "seed": 3},
            "return_token_ids": True,
        }
        status, told = await gateway.post("/inference/v1/generate", body)
    assert status == 200
    assert [choice["index"] for choice in told["choices"]] == [0, 1]
    assert told["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    assert told["prompt_token_ids"] == IDS
