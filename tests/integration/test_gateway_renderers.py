"""Turns of text whose renderer is away for a while, or breaks under their requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from harvester.contracts.ids import JobId
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_renderer import FakeRenderer, text_of
from tests.integration.gateway_in_process import GatewayInProcess, Site, continued, gateway_on
from tests.integration.test_gateway_dialects import HELLO, IDS

CHAT = "/v1/chat/completions"
COUNT = 40
TEXT = text_of(continued(IDS, COUNT, version=0))
SHORT = {"role": "user", "content": "hi"}
BODY = {"messages": HELLO, "max_tokens": COUNT}


@asynccontextmanager
async def gateway_and_renderer(
    *, queue_s: float = 30.0
) -> AsyncIterator[tuple[GatewayInProcess, Site]]:
    renderer, engine = Site(), FakeEngine(step_s=0.005, epoch=None)
    await renderer.serve(FakeRenderer().app())
    given = {"renderers": [renderer.url], "timeouts": {"queue_s": queue_s}}
    try:
        async with gateway_on(engine, **given) as service:
            yield service, renderer
    finally:
        await renderer.close()


async def ended(service: GatewayInProcess, turns: int) -> None:
    counters = service.scheduler.ledgers[JobId("job")].counters
    await service.until(lambda: counters.completed == turns)


def undelivered(service: GatewayInProcess) -> int:
    return service.scheduler.ledgers[JobId("job")].counters.undelivered


async def streamed(service: GatewayInProcess) -> list[dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(service.url + CHAT, json=BODY | {"stream": True}) as reply,
    ):
        lines = (await reply.text()).splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


async def test_turns_that_end_while_their_renderer_is_away_are_delivered_when_it_is_back() -> None:
    async with gateway_and_renderer() as (service, renderer):
        waiting = [asyncio.create_task(service.post(CHAT, BODY)) for _ in range(8)]
        await service.until_tokens(5, turns=8)
        await renderer.close()
        await ended(service, 8)
        late = asyncio.create_task(service.post(CHAT, BODY))
        await renderer.serve(FakeRenderer().app())
        for status, reply in await asyncio.gather(*waiting, late):
            assert (status, reply["choices"][0]["message"]["content"]) == (200, TEXT)
        assert undelivered(service) == 0


async def test_a_stream_goes_on_when_its_renderer_is_back() -> None:
    async with gateway_and_renderer() as (service, renderer):
        waiting = asyncio.create_task(streamed(service))
        await service.until_tokens(5)
        await renderer.close()
        await ended(service, 1)
        await renderer.serve(FakeRenderer().app())
        told = [event["choices"][0]["delta"]["content"] for event in await waiting]
    assert "".join(told) == TEXT


async def test_an_engine_that_renders_may_restart_under_turns_that_have_ended() -> None:
    asked = asyncio.Event()

    class EndingRenderer(FakeRenderer):
        async def derender_chat(self, request: web.Request) -> web.Response:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    def app(renderer: FakeRenderer) -> web.Application:
        return renderer.app(FakeEngine(step_s=0.001, epoch=None).app())

    engine = Site()
    await engine.serve(app(EndingRenderer()))
    async with gateway_on(engine.url) as service:
        waiting = asyncio.create_task(service.post(CHAT, BODY))
        await asked.wait()
        await engine.serve(app(FakeRenderer()))
        status, reply = await waiting
    await engine.close()
    assert (status, reply["choices"][0]["message"]["content"]) == (200, TEXT)


@pytest.mark.parametrize("short_tokens", [4, 40])
async def test_a_turn_that_is_too_long_for_the_engine_that_is_left_waits_for_the_longer_one(
    short_tokens: int,
) -> None:
    sites = Site(), Site()

    async def serve(site: Site, context: int) -> None:
        engine = FakeEngine(step_s=0.001, epoch=None, context=context)
        await site.serve(FakeRenderer(context=context).app(engine.app()))

    await serve(sites[0], short_tokens)
    await serve(sites[1], 64)
    async with gateway_on(*(site.url for site in sites)) as service:
        await service.until(
            lambda: all(each.is_described for each in service.scheduler.fleet.members.values())
        )
        await sites[1].close()
        waiting = asyncio.create_task(service.post(CHAT, BODY))
        assert (await service.post(CHAT, BODY | {"messages": [SHORT], "max_tokens": 1}))[0] == 200
        assert not waiting.done()
        await serve(sites[1], 64)
        status, reply = await waiting
    for site in sites:
        await site.close()
    assert (status, reply["choices"][0]["message"]["content"]) == (200, TEXT)


async def test_text_that_no_renderer_gives_in_time_is_an_error_and_counted() -> None:
    async with gateway_and_renderer(queue_s=0.5) as (service, renderer):
        waiting = asyncio.create_task(service.post(CHAT, BODY))
        stream = asyncio.create_task(streamed(service))
        await service.until_tokens(5, turns=2)
        await renderer.close()
        status, reply = await waiting
        assert (status, "cannot be rendered" in reply["error"]["message"]) == (503, True)
        assert "cannot be rendered" in (await stream)[-1]["error"]["message"]
        assert undelivered(service) == 2
        status, _ = await service.post(CHAT, BODY)
        assert (status, undelivered(service)) == (503, 2)
        await renderer.serve(FakeRenderer().app())
        assert (await service.post(CHAT, BODY))[0] == 200


@pytest.mark.parametrize("answer", ["broken", "500", "nonsense"])
async def test_a_request_that_fails_at_its_renderer_is_tried_three_times_beside_others(
    answer: str,
) -> None:
    calls = 0

    class FrailRenderer(FakeRenderer):
        async def render_chat(self, request: web.Request) -> web.Response:
            nonlocal calls
            if (await request.json()).get("user") != "poison":
                return await super().render_chat(request)
            calls += 1
            if answer == "broken":
                assert request.transport is not None
                request.transport.abort()
            return web.Response(status=500 if answer == "500" else 200, text="{")

    async with gateway_and_renderer() as (service, renderer):
        await renderer.serve(FrailRenderer().app())
        poison = asyncio.create_task(service.post(CHAT, BODY | {"user": "poison"}))
        assert (await service.post(CHAT, BODY))[0] == 200
        assert (await poison)[0] == (502 if answer == "nonsense" else 503)
        assert calls == 3


SGLANG, COMPLETIONS = "/generate", "/v1/completions"
TEXTS = {
    CHAT: BODY,
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    SGLANG: {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
}
ANSWERS: tuple[Any, ...] = ({}, [{}], [3], {"token_ids": "x"}, {"choices": [3]}, {"choices": []})


class HollowRenderer(FakeRenderer):
    """Answers calls of some routes with JSON that is no reply of vLLM's."""

    def __init__(self, answer: Any, routes: str) -> None:
        super().__init__()
        self._answer, self._routes = answer, routes

    def app(self, app: web.Application | None = None) -> web.Application:
        @web.middleware
        async def hollow(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.path.rpartition("/")[2] in self._routes.split():
                return web.json_response(self._answer)
            response: web.StreamResponse = await handler(request)
            return response

        served = super().app(app)
        served.middlewares.append(hollow)
        return served


@pytest.mark.parametrize("path", TEXTS)
@pytest.mark.parametrize("routes", ["render tokenize", "derender"])
async def test_a_malformed_reply_of_a_renderer_is_a_502_in_the_dialect_s_form(
    path: str, routes: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_and_renderer() as (service, renderer):
        for answer in ANSWERS:
            await renderer.serve(HollowRenderer(answer, routes).app())
            status, reply = await service.post(path, TEXTS[path])
            told = reply["error"] if path == SGLANG else reply["error"]["message"]
            assert (status, "malformed reply" in told, len(told) < 400) == (502, True, True), answer
    logged = [each for each in caplog.records if "malformed reply" in each.getMessage()]
    assert len(logged) == len(ANSWERS)
    assert not any(each.exc_info for each in caplog.records)


LISTS = ("text_offset", "tokens", "token_logprobs", "top_logprobs")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 200),
        ({"logprobs": None}, 200),
        ({"logprobs": dict.fromkeys(LISTS, [0] * 2) | {"bytes": [[1], [2]]}}, 200),
        ({"logprobs": {name: [] for name in LISTS}}, 502),
    ],
)
async def test_an_echo_needs_no_more_of_a_renderer_s_log_probabilities_than_vllm_s_lists(
    given: dict[str, Any], expected: int
) -> None:
    async with gateway_and_renderer() as (service, renderer):
        answer = {"choices": [{"text": "hi"} | given]}
        await renderer.serve(HollowRenderer(answer, "derender").app())
        body = TEXTS[COMPLETIONS] | {"echo": True, "logprobs": 1}
        status, reply = await service.post(COMPLETIONS, body)
    assert status == expected, reply
    assert status == 200 or "log-probabilities" in reply["error"]["message"]


@pytest.mark.parametrize("answer", [{}, {"chunk": {}}, {"chunk": {"choices": [3]}}])
async def test_a_malformed_part_of_streamed_text_ends_the_stream_in_words(answer: Any) -> None:
    async with gateway_and_renderer() as (service, renderer):
        await renderer.serve(HollowRenderer(answer, "derender").app())
        status, reply = await service.post(CHAT, BODY | {"stream": True})
    assert (status, "malformed reply" in reply["error"]["message"]) == (502, True)


async def test_a_renderer_s_refusal_that_is_no_json_has_the_dialect_s_form() -> None:
    class PlainRenderer(FakeRenderer):
        async def render_chat(self, request: web.Request) -> web.Response:
            return web.Response(status=400, text="wrong " * 1000)

    async with gateway_and_renderer() as (service, renderer):
        await renderer.serve(PlainRenderer().app())
        status, reply = await service.post(CHAT, BODY)
    assert (status, reply["error"]["message"][:5], reply["error"]["code"]) == (400, "wrong", 400)
    assert len(reply["error"]["message"]) <= 500
