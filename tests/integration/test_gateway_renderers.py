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
        assert (await poison)[0] == 503
        assert calls == 3
