"""A turn leaves an engine that hangs, and not one that computes a long prompt."""

import asyncio
import time

import pytest
from aiohttp import web

from harvester.contracts.clock import wall_seconds
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, continued, gateway_on

STALL_S = 0.3


def fakes(*, prefill_s: float) -> list[FakeEngine]:
    engines = [FakeEngine(step_s=0.001, epoch=None) for _ in range(2)]
    for engine in engines:
        engine.prefill_s = prefill_s
    return engines


async def test_turns_whose_first_token_takes_longer_than_the_bound_end() -> None:
    async with gateway_on(*fakes(prefill_s=4 * STALL_S), timeouts={"stall_s": STALL_S}) as gateway:
        await gateway.publish(1)
        retried = gateway.scheduler.ledgers["job"].counters
        async with asyncio.timeout(30):
            for step in range(3):
                turns = [gateway.generate(f"t{step}.{each}", 20) for each in range(6)]
                for status, choice in await asyncio.gather(*turns):
                    assert (status, choice["token_ids"]) == (200, continued(PROMPT, 20, version=1))
                if step == 0:
                    before = retried.retried
        # Once the engines are known to be slow, no turn leaves them.
        assert retried.retried == before


async def test_turns_that_wait_and_answers_that_are_kept_do_not_read_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that is set by a day would end deadlines, or hold them open."""
    wall_s = wall_seconds()
    engine = FakeEngine(step_s=0.001, epoch=None)
    listed = [{"id": "e0", "url": "", "concurrency": 1}]
    async with gateway_on(engine) as helper:
        listed[0]["url"] = helper.sites[0].url
        async with gateway_on(engines=listed, answers={"keep_s": 60}) as gateway:
            _, kept = await gateway.generate("kept", 5)
            engine.running.clear()
            first = asyncio.create_task(gateway.generate("first", 5))
            await gateway.until(lambda: engine.open)
            queued = asyncio.create_task(gateway.generate("queued", 5))
            pinned = asyncio.create_task(
                gateway.generate("pinned", 5, weight_version={"minimum": 1, "wait_s": 60})
            )
            await gateway.until(lambda: len(gateway.scheduler.ledgers["job"]) == 3)
            for step_s in (86400, -86400):
                monkeypatch.setattr(time, "time", lambda step_s=step_s: wall_s + step_s)
                await asyncio.sleep(0.2)
                assert not any(turn.done() for turn in (first, queued, pinned))
                assert (await gateway.generate("kept", 5))[1] == kept
                assert len(engine.models) == 2, "the kept answer was not sampled again"
            engine.running.set()
            for turn in (first, queued):
                assert (await turn)[1]["token_ids"] == continued(PROMPT, 5, version=0)
            await gateway.publish(1)
            assert (await pinned)[1]["token_ids"] == continued(PROMPT, 5, version=1)


class ChattyEngine(FakeEngine):
    """Sends chunks, and no token."""

    async def _stream(self, response: web.StreamResponse, *_: object) -> None:
        while True:
            await response.write(b'data: {"choices": [{"index": 0, "token_ids": []}]}\n\n')
            await asyncio.sleep(0.01)


async def test_an_engine_that_sends_chunks_without_a_token_is_silent() -> None:
    """Its turns would wait there for ever, beside an engine that serves."""
    engines = [ChattyEngine(step_s=0.001, epoch=None), FakeEngine(step_s=0.001, epoch=None)]
    async with gateway_on(*engines, timeouts={"stall_s": STALL_S}) as gateway, asyncio.timeout(30):
        for status, choice in await asyncio.gather(
            *(gateway.generate(f"t{n}", 20) for n in range(4))
        ):
            assert (status, choice["token_ids"]) == (200, continued(PROMPT, 20, version=0))


async def test_turns_leave_a_hung_engine_for_the_places_that_there_are() -> None:
    engines = fakes(prefill_s=0.0)
    async with gateway_on(*engines, timeouts={"stall_s": STALL_S}) as gateway:
        await gateway.publish(1)
        turns = [asyncio.create_task(gateway.generate(f"t{n}", 600)) for n in range(12)]
        async with asyncio.timeout(30):
            while not engines[0].open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            engines[0].stalled = True
            for status, choice in await asyncio.gather(*turns):
                assert (status, choice["token_ids"]) == (200, continued(PROMPT, 600, version=1))


async def test_a_turn_without_a_token_is_not_given_up_for_another_job_s_phase() -> None:
    (engine, _), stuck_s = fakes(prefill_s=0.0), 3.0
    async with gateway_on(engine, timeouts={"stuck_s": stuck_s}) as gateway:
        await gateway.publish(1)
        turn = asyncio.create_task(gateway.generate("t", 400))
        await gateway.until_tokens(2)
        engine.prefill_s = 60.0
        await gateway.publish(2)
        await gateway.until(lambda: engine.open == 1)
        await gateway.post("/v1/jobs/job/dedicated", {"enabled": False})
        await asyncio.sleep(2 * stuck_s)
        await gateway.post("/v1/jobs/job/dedicated", {"enabled": True})
        await gateway.until(lambda: engine.open == 1)
        # CutReason once more before a token, by the next version.
        await gateway.publish(3)
        engine.prefill_s = 0.0
        await gateway.publish(4)
        status, choice = await turn
        assert (status, choice["finish_reason"], choice["fault"]) == (200, "length", "")


async def test_a_gateway_that_was_late_itself_moves_no_turn() -> None:
    """All engines were silent for as long as it read none of them."""
    async with gateway_on(*fakes(prefill_s=0.0), timeouts={"stall_s": STALL_S}) as gateway:
        await gateway.publish(1)
        turns = [asyncio.create_task(gateway.generate(f"t{n}", 400)) for n in range(8)]
        for _ in range(3):
            await asyncio.sleep(0.1)
            time.sleep(4 * STALL_S)  # noqa: ASYNC251 - the event loop is what stands still
        async with asyncio.timeout(30):
            for status, choice in await asyncio.gather(*turns):
                assert (status, choice["token_ids"]) == (200, continued(PROMPT, 400, version=1))
        assert gateway.scheduler.ledgers["job"].counters.retried == 0
