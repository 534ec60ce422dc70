"""More turns at once than the engines take: held and served, or refused as their clients retry."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harvester.platform import http_kit
from scheduler.gateway.serve_command import reconfigure
from scheduler.gateway.settings import AnswerSettings
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_renderer import FakeRenderer
from tests.integration.gateway_in_process import GatewayInProcess, Site, gateway_on

STEP_TURNS = 8000
PROMPT_TOKENS = 256
MAX_GROWTH_BYTES = 768 << 20
"""Three times what it takes: sockets and frames of 8,000 requests, their bodies, their prompts."""

NATIVE, CHAT, COMPLETION, SGLANG = (
    "/inference/v1/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
)
PRESSURE = {NATIVE: 429, CHAT: 503, COMPLETION: 503, SGLANG: 429}


def body_for(route: str, *, n: int = 1, filler: str = "") -> dict[str, Any]:
    sampling = {"n": n, "temperature": 1.0}
    match route:
        case "/inference/v1/generate":
            sampling["max_tokens"] = 4
            body = {"request_id": "r", "token_ids": [1, 2], "sampling_params": sampling}
            return body | ({"cache_salt": filler} if filler else {})
        case "/v1/chat/completions":
            message = {"role": "user", "content": "hi" + filler}
            return {"messages": [message], "max_tokens": 4, **sampling}
        case "/v1/completions":
            return {"prompt": "hi" + filler, "max_tokens": 4, **sampling}
        case _:
            sampling["max_new_tokens"] = 4
            return {"text": "hi" + filler, "sampling_params": sampling}


def peak_rss_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


async def test_a_synchronous_steps_8000_turns_are_all_served(fake_engine, gateway) -> None:
    service = gateway(*(fake_engine(step_s=0.0) for _ in range(2)))
    before_bytes = peak_rss_bytes(service.process.pid)
    prompt = list(range(PROMPT_TOKENS))

    async def served(session: aiohttp.ClientSession, at: int) -> tuple[int, int]:
        sampling = {"max_tokens": 2, "temperature": 1.0}
        name, token_ids = f"t{at}", [at % PROMPT_TOKENS, *prompt]
        body = {"request_id": name, "token_ids": token_ids, "sampling_params": sampling}
        async with session.post(service.url + NATIVE, json=body) as response:
            reply = await response.json()
            return response.status, len(reply["choices"][0]["token_ids"])

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        replies = await asyncio.gather(*(served(session, at) for at in range(STEP_TURNS)))
    assert set(replies) == {(200, 2)}
    assert peak_rss_bytes(service.process.pid) - before_bytes < MAX_GROWTH_BYTES


async def test_without_descriptors_requests_are_refused_in_words_and_none_hangs(
    fake_engine, gateway, capfd
) -> None:
    service = gateway(fake_engine(step_s=0.01), descriptors=128)
    sampling = {"max_tokens": 4}

    async def status(session: aiohttp.ClientSession, route: str, at: int) -> int:
        body = {"request_id": f"r{at}", "token_ids": [1], "sampling_params": sampling}
        async with session.post(service.url + route, json=body) as reply:
            await reply.read()
            return reply.status

    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        replies = await asyncio.gather(*(status(session, NATIVE, at) for at in range(80)))
        again = [await status(session, NATIVE, 100) for _ in range(2)]
    assert set(replies) == {200, 429}
    # 128 less 64 of its own and 8 places of the engine.
    assert replies.count(200) >= 56
    assert again == [200, 200]
    lines = capfd.readouterr().err.splitlines()
    warned = [line.partition(": ")[2] for line in lines if " WARNING " in line]
    assert [line.split()[0] for line in warned] == ["queue_turns", "no"], lines


async def test_bodies_of_unknown_length_count_as_what_has_come() -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with gateway_on(engine, max_open_bytes=4096) as service:
        engine.running.clear()
        waiting = [asyncio.create_task(chunked(service, f"r{at}")) for at in range(8)]
        await until(lambda: engine.open == 8)
        assert service.service.open_bodies.held < 4096
        assert await chunked(service, "large", filler="x" * 4096) == 429
        engine.running.set()
        assert set(await asyncio.gather(*waiting)) == {200}
        assert service.service.open_bodies.held == 0
    async with gateway_on(engine, max_body_bytes=1024) as service:
        assert await chunked(service, "too large", filler="x" * 1024) == 413


async def chunked(service: GatewayInProcess, name: str, *, filler: str = "s") -> int:
    """The status of a request whose length is not declared."""
    body = {"request_id": name, "token_ids": [1], "cache_salt": filler}
    whole = json.dumps(body | {"sampling_params": {"max_tokens": 2}}).encode()

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(whole), 64):
            yield whole[at : at + 64]

    async with (
        aiohttp.ClientSession() as session,
        session.post(service.url + NATIVE, data=parts()) as reply,
    ):
        await reply.read()
        return reply.status


async def refused(service: GatewayInProcess, route: str, body: dict[str, Any]) -> tuple[int, str]:
    """The status, and its delay until the next try."""
    async with (
        asyncio.timeout(30),
        aiohttp.ClientSession() as session,
        session.post(service.url + route, json=body) as response,
    ):
        assert "error" in await response.json()
        return response.status, response.headers["Retry-After"]


@pytest.mark.parametrize("route", PRESSURE)
async def test_a_full_queue_answers_with_the_status_that_clients_of_the_route_retry(route) -> None:
    renderer, engine = Site(), FakeEngine(step_s=0.001, epoch=None)
    await renderer.serve(FakeRenderer().app())
    async with gateway_on(engine, renderers=[renderer.url], routing={"queue_turns": 2}) as service:
        assert await refused(service, route, body_for(route, n=3)) == (PRESSURE[route], "10")
        assert engine.most_open == 0
        assert (await service.post(route, body_for(route, n=2)))[0] == 200
    await renderer.close()


@pytest.mark.parametrize("route", PRESSURE)
async def test_open_bodies_are_bounded_together_and_one_alone_is_always_taken(route) -> None:
    renderer, engine = Site(), FakeEngine(step_s=0.001, epoch=None)
    await renderer.serve(FakeRenderer().app())
    async with gateway_on(engine, renderers=[renderer.url], max_open_bytes=1024) as service:
        engine.running.clear()
        large = body_for(route, filler="x" * 1000)
        first = asyncio.create_task(service.post(route, large))
        await until(lambda: engine.open == 1)
        again = large | {"request_id": "s"} if route == NATIVE else large
        assert await refused(service, route, again) == (PRESSURE[route], "10")
        engine.running.set()
        assert (await first)[0] == 200
        assert (await service.post(route, again))[0] == 200
    await renderer.close()


async def test_a_client_joins_its_request_of_several_turns_while_the_queue_is_full() -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with gateway_on(engine, routing={"queue_turns": 2}) as service:
        assert (await service.generate("served", 1))[0] == 200
        engine.running.clear()
        first = [asyncio.create_task(service.generate(f"s{at}", 2)) for at in range(8)]
        await until(lambda: engine.open == 8)
        body = body_for(NATIVE, n=2)
        waiting = asyncio.create_task(service.post(NATIVE, body))
        routing = service.scheduler.dispatcher.policy
        await until(lambda: routing.queued_turns == 2)
        assert (await refused(service, NATIVE, body | {"request_id": "other"}))[0] == 429
        waiting.cancel()
        again = asyncio.create_task(service.post(NATIVE, body))
        assert (await refused(service, NATIVE, body | {"request_id": "third"}))[0] == 429
        engine.running.set()
        status, reply = await again
        assert (status, len(reply["choices"])) == (200, 2)
        await asyncio.gather(*first)


async def test_a_tenant_that_fills_the_memory_for_bodies_leaves_the_others_their_share(
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.touch(mode=0o600)
    tokens.write_text("greedy: a-token-of-greedy\nmodest: a-token-of-modest\n")
    jobs = [{"id": "a", "tenant": "greedy", "active": True}, {"id": "b", "tenant": "modest"}]
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with gateway_on(engine, tokens=tokens, jobs=jobs, max_open_bytes=2048) as service:
        engine.running.clear()

        def as_tenant(name: str) -> dict[str, str]:
            return {"Authorization": f"Bearer a-token-of-{name}"}

        async def post(tenant: str, request_id: str) -> int:
            body = body_for(NATIVE, filler="x" * 600) | {"request_id": request_id}
            return (await service.post(NATIVE, body, as_tenant(tenant)))[0]

        filling = [asyncio.create_task(post("greedy", name)) for name in "qrs"]
        await until(lambda: sum(task.done() for task in filling) or engine.open == 2)
        await asyncio.wait(filling, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in filling if task.done()] == [429]
        assert await post("modest", "m") == 503, "its job is not active, so its body was read"
        assert await post("greedy", "t") == 429
        engine.running.set()
        assert sorted(await asyncio.gather(*filling)) == [200, 200, 429]


@pytest.mark.parametrize("route", PRESSURE)
async def test_a_body_that_comes_slowly_is_refused_in_the_dialects_form_and_counts_no_more(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_kit, "BODY_S", 0.05)
    async with gateway_on(FakeEngine(step_s=0.001, epoch=None)) as service:
        address = service.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(address[0], int(address[1]))
        writer.write(f"POST {route} HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{{".encode())
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            assert length is not None
            error = json.loads(await reader.readexactly(int(length[1])))["error"]
        assert b" 408 " in head
        message = error if route == SGLANG else error["message"]
        assert "not whole within 0.05 s" in message
        assert service.service.open_bodies.held == 0
        writer.close()


async def until(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - of objects without an event
            await asyncio.sleep(0.005)


async def test_a_reload_is_in_force_for_the_next_request_and_keeps_what_waits() -> None:
    engine = FakeEngine(step_s=0.01, epoch=None)
    async with gateway_on(engine, routing={"queue_turns": 1}) as gateway:
        before = gateway.scheduler.settings

        def reload(**changes: Any) -> None:
            reconfigure(
                gateway.service, gateway.scheduler, lambda: before.model_copy(update=changes)
            )

        await gateway.post("/pause?mode=keep", {})
        waiting = [asyncio.create_task(gateway.generate("first", 2))]
        await gateway.until(lambda: gateway.scheduler.dispatcher.policy.queued_turns == 1)
        assert (await gateway.generate("second", 2))[0] == 429
        reload(routing={"queue_turns": 2})
        waiting.append(asyncio.create_task(gateway.generate("second", 2)))
        await gateway.until(lambda: gateway.scheduler.dispatcher.policy.queued_turns == 2)
        reload(routing={"queue_turns": 2}, max_open_bytes=1 << 10)
        status, reply = await gateway.generate("third", 2, prompt=[1] * 1000)
        assert (status, "max_open_bytes is 1024" in str(reply)) == (429, True)
        reload(answers=AnswerSettings(keep_s=0))
        await gateway.post("/resume", {})
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]
        assert gateway.scheduler.answered.size_bytes == 0
