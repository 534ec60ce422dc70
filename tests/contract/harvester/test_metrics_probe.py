"""The scrape of consent level `metrics`, of a page as vLLM's process serves it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from harvester.agent.engine_probes import MAX_SCRAPE_BYTES, EngineMetrics, MetricsProbe

LEVELS = EngineMetrics(
    running=3.0,
    waiting=2.0,
    kv_usage_ratio=0.25,
    prompt_tokens_total=100.0,
    generation_tokens_total=40.0,
)
Narrow = Callable[["Page", web.Request], web.Response]
SEGMENT_BYTES = 200


class Page:
    """`/metrics` in full; `/metrics/` as `narrow` answers."""

    def __init__(self, narrow: Narrow) -> None:
        self._narrow = narrow
        self.asked: list[str] = []
        self.registry = CollectorRegistry()
        for name, value in {
            "vllm:num_requests_running": 3.0,
            "vllm:num_requests_waiting": 2.0,
            "vllm:kv_cache_usage_perc": 0.25,
            "vllm:lora_requests_info": 1.0,
        }.items():
            Gauge(name, "", registry=self.registry).set(value)
        Counter("vllm:prompt_tokens", "", registry=self.registry).inc(100)
        Counter("vllm:generation_tokens", "", registry=self.registry).inc(40)
        self.application = web.Application()
        self.application.router.add_get("/metrics", self._whole)
        self.application.router.add_get("/metrics/", self._named)

    async def _whole(self, request: web.Request) -> web.StreamResponse:
        """In segments, as a network brings it."""
        self.asked.append("whole")
        page = generate_latest(self.registry)
        reply = web.StreamResponse(headers={"Content-Length": str(len(page))})
        await reply.prepare(request)
        for at in range(0, len(page), SEGMENT_BYTES):
            await reply.write(page[at : at + SEGMENT_BYTES])
            await asyncio.sleep(0.005)
        return reply

    async def _named(self, request: web.Request) -> web.Response:
        self.asked.append("narrow")
        return self._narrow(self, request)


def as_prometheus_client(page: Page, request: web.Request) -> web.Response:
    named = page.registry.restricted_registry(request.query.getall("name[]"))
    body = generate_latest(named)
    assert b"lora_requests_info" not in body
    return web.Response(body=body)


def refuses(_: Page, __: web.Request) -> web.Response:
    return web.Response(status=404)


def says_nothing(_: Page, __: web.Request) -> web.Response:
    return web.Response(text="")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_vllm_writes_out_no_more_than_is_read(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    page = Page(as_prometheus_client)
    async with TestServer(page.application) as server:
        probe = MetricsProbe(str(server.make_url("/metrics")), pages=tmp_path)
        assert [await probe.scrape(session) for _ in range(3)] == [LEVELS] * 3
    assert page.asked == ["narrow"] * 3


@pytest.mark.parametrize("narrow", [refuses, says_nothing])
async def test_an_empty_narrow_page_switches_to_the_whole_page(
    narrow: Narrow, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    page = Page(narrow)
    async with TestServer(page.application) as server:
        probe = MetricsProbe(str(server.make_url("/metrics")), pages=tmp_path)
        assert [await probe.scrape(session) for _ in range(3)] == [LEVELS] * 3
    assert page.asked == ["narrow", "whole", "whole", "whole"]


async def test_a_probe_is_led_to_no_other_address(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    page = Page(lambda *_: web.Response(status=302, headers={"Location": "/metrics"}))
    async with TestServer(page.application) as server:
        probe = MetricsProbe(str(server.make_url("/metrics/")), pages=tmp_path)
        assert await probe.scrape(session) is None
    assert set(page.asked) == {"narrow"}


async def test_an_engine_without_values_yet_gets_another_narrow_request(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    page = Page(as_prometheus_client)
    told, page.registry = page.registry, CollectorRegistry()
    async with TestServer(page.application) as server:
        probe = MetricsProbe(str(server.make_url("/metrics")), pages=tmp_path)
        assert await probe.scrape(session) is None
        page.registry = told
        assert await probe.scrape(session) == LEVELS
    assert page.asked == ["narrow", "whole", "narrow"]


async def test_an_engine_that_breaks_off_gets_no_further_request(
    session: aiohttp.ClientSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks_off(_: Page, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    page = Page(breaks_off)
    async with TestServer(page.application) as server:
        probe = MetricsProbe(str(server.make_url("/metrics")), pages=tmp_path)
        assert [await probe.scrape(session) for _ in range(2)] == [None, None]
    assert set(page.asked) == {"narrow"}
    assert caplog.text.count("scrape of") == 1


async def test_a_page_that_is_cut_is_missing_data(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    def endless(page: Page, _: web.Request) -> web.Response:
        levels = generate_latest(page.registry)
        return web.Response(body=levels + b"#" * MAX_SCRAPE_BYTES)

    page = Page(endless)
    async with TestServer(page.application) as server:
        probe = MetricsProbe(str(server.make_url("/metrics/")), pages=tmp_path)
        assert await probe.scrape(session) is None


async def test_the_largest_page_stalls_no_beat(
    session: aiohttp.ClientSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Slots share the loop; 8 MiB of samples had held it for seconds."""
    sample = b'vllm:num_requests_running{engine="0"} 1\n'

    def full(_: Page, __: web.Request) -> web.Response:
        return web.Response(body=sample * (MAX_SCRAPE_BYTES // len(sample)))

    page, loop = Page(full), asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 0.5
    async with TestServer(page.application) as server:
        probe = MetricsProbe(str(server.make_url("/metrics/")), pages=tmp_path)
        assert await probe.scrape(session) is None
    assert "seconds" not in caplog.text


async def test_the_url_s_own_query_is_kept(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    def behind_a_key(page: Page, request: web.Request) -> web.Response:
        assert request.query["key"] == "k"
        return as_prometheus_client(page, request)

    page = Page(behind_a_key)
    async with TestServer(page.application) as server:
        probe = MetricsProbe(str(server.make_url("/metrics?key=k")), pages=tmp_path)
        assert await probe.scrape(session) == LEVELS
    assert page.asked == ["narrow"]
