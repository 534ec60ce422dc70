"""Large requests and large events of engines beside others: how much happens in one pass of the
event loop. Passes are counted, not timed."""

import asyncio
import io
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from harvester.contracts.ids import JobId
from scheduler.gateway import loop_share
from scheduler.gateway.loop_share import AT_ONCE, ENTERED_AT_ONCE
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_renderer import FakeRenderer
from tests.integration.gateway_in_process import GatewayInProcess, Site, gateway_on

NATIVE, COMPLETION, SGLANG = "/inference/v1/generate", "/v1/completions", "/generate"
JOB = JobId("job")


async def most_in_a_pass(work: asyncio.Task[Any], count: Callable[[], int]) -> int:
    """The largest growth of a count between two passes of the loop until the work is done."""
    most, before = 0, count()
    while not work.done():
        await asyncio.sleep(0)
        most, before = max(most, count() - before), count()
    return most


def started(gateway: GatewayInProcess) -> Callable[[], int]:
    return lambda: gateway.scheduler.ledgers[JOB].counters.started


async def test_turns_of_a_large_request_begin_a_few_in_each_pass() -> None:
    renderer = Site()
    await renderer.serve(FakeRenderer().app())
    bodies: dict[str, dict[str, Any]] = {
        NATIVE: {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "n": 300}},
        COMPLETION: {"prompt": ["hi"] * 100, "max_tokens": 2, "n": 3},
        SGLANG: {"input_ids": [[1, 2]] * 100, "sampling_params": {"max_new_tokens": 2, "n": 3}},
    }
    async with gateway_on(FakeEngine(step_s=0.0, epoch=None), renderers=[renderer.url]) as gateway:
        for at, (route, body) in enumerate(bodies.items(), start=1):
            work = asyncio.create_task(gateway.post(route, body))
            most = await most_in_a_pass(work, started(gateway))
            status, reply = work.result()
            assert (status, started(gateway)()) == (200, at * 300), route
            assert len(reply if isinstance(reply, list) else reply["choices"]) == 300
            assert 0 < most <= AT_ONCE, route
    await renderer.close()


async def test_a_steps_requests_that_come_at_once_begin_a_few_in_each_pass() -> None:
    async with gateway_on(FakeEngine(step_s=0.0, epoch=None)) as gateway:
        turns = [asyncio.create_task(gateway.generate(f"t{at}", 2)) for at in range(400)]
        work = asyncio.create_task(asyncio.wait(turns))
        assert 0 < await most_in_a_pass(work, started(gateway)) <= 2 * ENTERED_AT_ONCE
        assert {turn.result()[0] for turn in turns} == {200}


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        (NATIVE, '{"token_ids": [5], "sampling_params": {"extra_args": {"a": [', "]}}}"),
        (COMPLETION, '{"prompt": [', "]}"),
        (SGLANG, '{"input_ids": [', "]}"),
    ],
)
async def test_a_body_of_a_million_arrays_is_refused_before_it_is_decoded(
    path: str, before: str, after: str
) -> None:
    """One such body would stop every reader for a second."""
    body = before + ",".join(["[1]"] * (1 << 20)) + after
    async with (
        gateway_on(FakeEngine(step_s=0.001, epoch=None)) as gateway,
        aiohttp.ClientSession() as session,
        session.post(gateway.url + path, data=io.BytesIO(body.encode())) as reply,
    ):
        assert reply.status == 413
        assert "more than 524288 arrays, objects and members" in await reply.text()


async def test_a_client_that_leaves_while_its_turns_begin_leaves_none_and_no_place() -> None:
    engine = FakeEngine(step_s=0.0, epoch=None)
    async with gateway_on(engine, timeouts={"rejoin_s": 0.05}) as gateway:
        engine.running.clear()
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "n": 1000}}
        async with aiohttp.ClientSession() as session:
            leaving = asyncio.create_task(session.post(gateway.url + NATIVE, json=body))
            while started(gateway)() < 100:  # noqa: ASYNC110 - passes are what is counted
                await asyncio.sleep(0)
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                await leaving
        routing, ledger = gateway.scheduler.dispatcher.policy, gateway.scheduler.ledgers[JOB]
        await gateway.until(lambda: not len(ledger) and not gateway.service.open_bodies.held)
        assert started(gateway)() < 1000
        assert (routing.open_turns, routing.queued_turns) == (0, 0)
        assert routing.room == 1 << 14
        engine.running.set()
        assert (await gateway.generate("next", 2))[0] == 200


class OneEventEngine(FakeEngine):
    """Sends all tokens of a turn in one event."""

    async def _stream(
        self,
        response: web.StreamResponse,
        _request_id: str,
        _token_ids: list[int],
        sampling: dict[str, Any],
        _meant: str,
    ) -> None:
        token_ids = [at % 256 for at in range(sampling["max_tokens"])]
        content = [{"token_id": each, "logprob": -0.5} for each in token_ids]
        choice = {"token_ids": token_ids, "logprobs": {"content": content}}
        event = json.dumps({"choices": [choice | {"finish_reason": "length"}]})
        await response.write(f"data: {event}\n\ndata: [DONE]\n\n".encode())


async def test_tokens_of_one_large_event_are_taken_over_several_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A fast machine takes half of them in one share of the shipped length.
    monkeypatch.setattr(loop_share, "_HELD_S", 0.002)
    engine, tokens = OneEventEngine(step_s=0.0, epoch=None), 1 << 16
    async with gateway_on(engine) as gateway:
        ledger = gateway.scheduler.ledgers[JOB]
        work = asyncio.create_task(gateway.generate("large", tokens))
        most = await most_in_a_pass(
            work, lambda: max((len(turn.token_ids) for turn in ledger.turns()), default=0)
        )
        status, choice = work.result()
        assert (status, choice["finish_reason"]) == (200, "length")
        assert choice["token_ids"] == [at % 256 for at in range(tokens)]
        assert 0 < most < tokens // 2
