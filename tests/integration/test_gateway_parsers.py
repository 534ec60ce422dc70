"""Chats that vLLM's parsers read: what the gateway adds to what its renderer tells of them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.integration.fake_engine import VOCABULARY, FakeEngine
from tests.integration.fake_renderer import FakeRenderer, text_of
from tests.integration.gateway_in_process import Site, continued, gateway_on

HELLO = [{"role": "user", "content": "hello"}]
IDS = [ord(c) for c in "hello"]
CALL = {"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def scores(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Log-probabilities of a stream of eight tokens that a parser reads."""
    renderer, engine, found = Site(), FakeEngine(step_s=0.03, epoch=None), []
    await renderer.serve(FakeRenderer(parses=True).app())
    body = {"messages": HELLO, "max_tokens": 8, "stream": True} | fields
    try:
        async with gateway_on(engine, renderers=[renderer.url]) as gateway:
            url = f"{gateway.url}/v1/chat/completions"
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
                events = (await reply.text()).strip().split("\n\n")[:-1]
    finally:
        await renderer.close()
    assert len(events) > 2
    for event in events:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            found += (choice.get("logprobs") or {}).get("content") or []
    return found


async def test_a_stream_that_a_parser_reads_has_each_token_s_log_probability() -> None:
    wanted = continued(IDS, 8, version=0)
    found = await scores({"logprobs": True, "top_logprobs": 1})
    assert [each["token"] for each in found] == [text_of([one]) for one in wanted]
    assert [each["logprob"] for each in found] == [-one / VOCABULARY for one in wanted]
    named = await scores({"logprobs": True, "return_tokens_as_token_ids": True})
    assert [each["token"] for each in named] == [f"token_id:{one}" for one in wanted]


async def test_log_probabilities_do_not_tell_hidden_reasoning() -> None:
    assert await scores({"logprobs": True, "include_reasoning": False}) == []
    assert await scores({}) == []


class CallingRenderer(FakeRenderer):
    """Takes any text for a call, and tells its end as vLLM 0.32 does: a whole reply's as the
    engine's, that of a stream which had a call as `tool_calls`, whatever ended it."""

    async def derender_chat(self, request: web.Request) -> web.Response:
        told = json.loads((await super().derender_chat(request)).body or b"")
        for choice in told.get("chunk", told)["choices"]:
            said = choice.get("delta") or choice["message"]
            said |= {"content": None, "tool_calls": [CALL]}
            if "delta" in choice and choice["finish_reason"]:
                choice["finish_reason"] = "tool_calls"
        return web.json_response(told)


@asynccontextmanager
async def calling(*, breaks_after: int = 0) -> AsyncIterator[str]:
    """URL of a gateway before an engine that ends at the third token of `hello`."""
    renderer, engine = Site(), FakeEngine(step_s=0.001, epoch=None)
    engine.eos, engine.breaks_after = [continued(IDS, 3, version=0)[2]], breaks_after
    await renderer.serve(CallingRenderer().app())
    try:
        async with gateway_on(engine, renderers=[renderer.url]) as gateway:
            yield f"{gateway.url}/v1/chat/completions"
    finally:
        await renderer.close()


async def ended(url: str, *, stream: bool, **fields: Any) -> str:
    body = {"messages": HELLO, "max_tokens": 8, "stream": stream, "tools": []} | fields
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
        assert reply.status == 200, await reply.text()
        if not stream:
            return str((await reply.json())["choices"][0]["finish_reason"])
        events = (await reply.text()).strip().split("\n\n")[:-1]
    return str(json.loads(events[-1].removeprefix("data: "))["choices"][0]["finish_reason"])


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("tool_choice", "reason"),
    [("auto", "tool_calls"), (None, "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")],
)
async def test_a_whole_reply_that_calls_ends_with_calls_unless_the_tool_was_named(
    tool_choice: Any, reason: str
) -> None:
    async with calling() as url:
        assert await ended(url, stream=False, tool_choice=tool_choice) == reason


async def test_a_stream_that_calls_ends_with_calls() -> None:
    async with calling() as url:
        assert await ended(url, stream=True, tool_choice="auto") == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_its_limit_cut_off_ends_at_the_length(stream: bool) -> None:
    async with calling() as url:
        assert await ended(url, stream=stream, tool_choice="auto", max_tokens=2) == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_lost_its_engine_ends_as_an_abort(stream: bool) -> None:
    partial = {"on_interrupt": "return_partial", "tool_choice": "auto"}
    async with calling(breaks_after=2) as url:
        assert await ended(url, stream=stream, **partial) == "abort"
