"""A broken stream is a fault of its attempt; a broken engine is down."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from harvester.contracts.ids import EngineId
from scheduler.gateway.engines import engine_client, stream
from scheduler.gateway.policy import repeated_deaths
from scheduler.gateway.policy.blame import BlamePolicy
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, GatewayInProcess, continued, gateway_on


def fake(*, step_s: float = 0.001) -> FakeEngine:
    return FakeEngine(step_s=step_s, epoch=None)


async def test_one_reset_stream_costs_no_other_turn_and_no_update() -> None:
    engine = fake(step_s=0.005)
    async with gateway_on(engine) as gateway:
        await gateway.publish(1)
        engine.calls.clear()
        beside = [asyncio.create_task(gateway.generate(f"b{each}", 40)) for each in range(5)]
        engine.breaks_after = 20
        status, choice = await gateway.generate("t", 40)
        assert (status, choice["finish_reason"]) == (200, "length")
        assert choice["token_ids"] == continued(PROMPT, 40, version=1)
        for status, choice in await asyncio.gather(*beside):
            assert (status, choice["token_ids"]) == (200, continued(PROMPT, 40, version=1))
        assert engine.calls == []
        assert gateway.scheduler.ledgers["job"].counters.retried == 1


async def test_streams_reset_side_by_side_count_once() -> None:
    engine = fake(step_s=0.005)
    async with gateway_on(engine) as gateway:
        await gateway.publish(1)
        engine.calls.clear()
        engine.breaks_after, engine.breaks = 20, 6
        turns = [gateway.generate(f"t{each}", 40) for each in range(6)]
        for status, choice in await asyncio.gather(*turns):
            assert (status, choice["token_ids"]) == (200, continued(PROMPT, 40, version=1))
        assert engine.calls == []


async def test_an_engine_that_breaks_every_stream_is_down_and_the_turn_goes_on_elsewhere() -> None:
    broken = fake()
    async with gateway_on(broken, fake(step_s=0.01)) as gateway:
        await gateway.publish(1)
        broken.calls.clear()
        broken.breaks_after, broken.breaks = 1, 1 << 30
        for each in range(8):
            status, choice = await gateway.generate(f"t{each}", 20)
            assert (status, choice["token_ids"]) == (200, continued(PROMPT, 20, version=1))
        # A downed engine is updated before it serves again.
        assert "/update_weights" in broken.calls


async def test_an_engine_that_is_gone_is_down_at_the_first_broken_stream() -> None:
    slow = fake(step_s=0.01)
    async with gateway_on(slow, fake(), timeouts={"health_s": 30, "connect_s": 0.5}) as gateway:
        await gateway.publish(1)
        turns = [asyncio.create_task(gateway.generate(f"t{each}", 60)) for each in range(6)]
        async with asyncio.timeout(30):
            while not slow.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await gateway.sites[0].close()
        for status, choice in await asyncio.gather(*turns):
            assert (status, choice["token_ids"]) == (200, continued(PROMPT, 60, version=1))
        assert not (await gateway.status())["engines"]["e0"]["up"]


@pytest.mark.parametrize("fault", ["misnamed", "unscored"])
async def test_the_log_probability_of_another_token_or_of_none_reaches_no_reply(fault: str) -> None:
    engine = fake()
    async with gateway_on(engine) as gateway:
        await gateway.publish(1)
        setattr(engine, fault, 1)
        status, choice = await gateway.generate("t", 20)
        assert (status, choice["token_ids"]) == (200, continued(PROMPT, 20, version=1))
        told = [each["token_id"] for each in choice["logprobs"]["content"]]
        assert told == choice["token_ids"]
        assert gateway.scheduler.ledgers["job"].counters.retried == 1


class CrossedReplies(FakeEngine):
    """Answers some requests with the reply to another one. `names`: whether its replies have their
    requests' ids, as they have none behind a proxy that gives requests its own."""

    names = True
    crossed = 0

    async def _stream(
        self, response: web.StreamResponse, request_id: str, token_ids: list[int], *given: Any
    ) -> None:
        if self.crossed:
            self.crossed, request_id, token_ids = self.crossed - 1, "another.1", [9, 9]
        await super()._stream(response, request_id if self.names else "own", token_ids, *given)


async def test_the_reply_to_another_request_is_no_part_of_a_turn() -> None:
    engine = CrossedReplies(step_s=0.001, epoch=None)
    async with gateway_on(engine) as gateway:
        await gateway.publish(1)
        for name in ("t0", "t1"):
            status, choice = await gateway.generate(name, 20)
            assert (status, choice["token_ids"]) == (200, continued(PROMPT, 20, version=1))
            engine.crossed = 1
        assert gateway.scheduler.ledgers["job"].counters.retried == 1
        assert (await gateway.status())["engines"]["e0"]["up"]


async def test_replies_need_no_request_s_id_where_none_has_one() -> None:
    engine = CrossedReplies(step_s=0.001, epoch=None)
    engine.names = False
    async with gateway_on(engine) as gateway:
        await gateway.publish(1)
        for name in ("t0", "t1"):
            status, choice = await gateway.generate(name, 20)
            assert (status, choice["token_ids"]) == (200, continued(PROMPT, 20, version=1))


class ShortScores(FakeEngine):
    """Scores a part of the first prompt."""

    def score(
        self, request_id: str, token_ids: list[int], sampling: dict[str, Any]
    ) -> web.Response:
        return super().score(request_id, token_ids[: None if self.scored else -1], sampling)


async def test_the_scores_of_another_prompt_reach_no_reply() -> None:
    engine = ShortScores(step_s=0.001, epoch=None)
    body = {
        "request_id": "t",
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 2, "prompt_logprobs": 0},
    }
    async with gateway_on(engine) as gateway:
        status, reply = await gateway.post("/inference/v1/generate", body)
        first, *scores = reply["prompt_logprobs"]
        assert (status, first, engine.scored) == (200, None, 2)
        assert [[*each] for each in scores] == [[str(token)] for token in PROMPT[1:]]


class LargeReplies(FakeEngine):
    """Its routed experts, or its scores, are larger than the gateway takes."""

    def score(
        self, request_id: str, token_ids: list[int], sampling: dict[str, Any]
    ) -> web.Response:
        reply = super().score(request_id, token_ids, sampling)
        self.scored += 1
        return web.json_response({**json.loads(reply.text or ""), "routed_experts": "x" * LARGE})

    async def _stream(self, response: web.StreamResponse, *given: Any) -> None:
        choice = {"index": 0, "token_ids": [1], "routed_experts": "x" * LARGE}
        event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        self.streamed += 1
        await response.write(event)

    streamed = 0


LARGE, TAKEN = 1 << 21, 1 << 16


@pytest.mark.parametrize("part", ["event", "scores"])
async def test_a_reply_larger_than_the_gateway_takes_is_refused_and_no_engine_s_fault(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stream, engine_client):
        monkeypatch.setattr(module, "MAX_EVENT_BYTES", TAKEN)
    engines = [LargeReplies(step_s=0.001, epoch=None) for _ in range(2)]
    sampling = {"max_tokens": 2, "prompt_logprobs": 0} if part == "scores" else {"max_tokens": 2}
    async with gateway_on(*engines) as gateway:
        for number in range(5):
            body = {"request_id": f"t{number}", "token_ids": PROMPT, "sampling_params": sampling}
            status, reply = await gateway.post("/inference/v1/generate", body)
            assert (status, "request fewer" in reply["error"]["message"]) == (400, True)
        assert sum(engine.streamed + engine.scored // 2 for engine in engines) == 5
        assert all(each["up"] for each in (await gateway.status())["engines"].values())


class SlowLargeReplies(FakeEngine):
    """Its events have 16 MiB, and end when the test says so."""

    sent = 0
    goes_on: asyncio.Event

    async def _stream(self, response: web.StreamResponse, *given: Any) -> None:
        content = [{"token_id": 1, "logprob": -1.0}]
        choice = {"index": 0, "token_ids": [1], "logprobs": {"content": content}}
        event = json.dumps({"choices": [choice | {"finish_reason": "length"}]})
        await response.write(f'data: {event[:-3]}, "routed_experts": "'.encode())
        for _ in range(256):
            await response.write(b"x" * (1 << 16))
        self.sent += 1
        await self.goes_on.wait()
        await response.write(b'"}]}\n\n')


async def test_most_large_events_wait_at_their_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of turns may end at once, each with the routed experts of all of its tokens."""
    monkeypatch.setattr(engine_client, "_MOST_LARGE", 2)
    engine = SlowLargeReplies(step_s=0.001, epoch=None)
    engine.goes_on = asyncio.Event()
    async with gateway_on(engine) as gateway:
        turns = [asyncio.create_task(gateway.generate(f"t{at}", 1)) for at in range(6)]
        await gateway.until(lambda: engine.sent == 2)
        await asyncio.sleep(0.5)
        assert engine.sent == 2
        engine.goes_on.set()
        for status, choice in await asyncio.gather(*turns):
            assert (status, len(choice["routed_experts"])) == (200, 1 << 24)


async def test_a_token_that_no_engine_has_a_log_probability_for_ends_the_turn_in_words() -> None:
    engines = [fake(), fake()]
    async with gateway_on(*engines, timeouts={"stuck_s": 1.0}) as gateway:
        await gateway.publish(1)
        engines[0].unscored = engines[1].unscored = 1 << 20
        status, reply = await gateway.generate("t", 5)
    assert status == 503
    assert "no log-probability of a sampled token" in reply["error"]["message"]


@asynccontextmanager
async def a_turn_whose_trial_is_silent(
    held_s: float,
) -> AsyncIterator[tuple[GatewayInProcess, FakeEngine, "asyncio.Task[tuple[int, Any]]"]]:
    """One engine has died under it, and the other broke its stream and answers nothing."""
    engines = [fake(step_s=0.01), fake(step_s=0.01)]
    async with gateway_on(*engines, timeouts={"connect_s": 0.1}) as gateway:
        await gateway.publish(1)
        gateway.scheduler.blame.policy = BlamePolicy(quiet_s=0, held_s=held_s)
        turn = asyncio.create_task(gateway.generate("t", 60))
        await gateway.until_tokens(5)
        first, second = sorted(engines, key=lambda engine: not engine.open)
        second.breaks_after, second.silent_once_broken = 1, True
        await gateway.sites[engines.index(first)].close()
        on_trial = gateway.scheduler.fleet.members[EngineId(f"e{engines.index(second)}")]
        await gateway.until(lambda: second.silent and not on_trial.up)
        yield gateway, second, turn


@pytest.mark.parametrize("held_s", [0.05, 30.0])
async def test_a_turn_on_trial_is_not_refused_for_an_engine_that_was_silent(held_s: float) -> None:
    """Its engine proves alive after the verdict would have fallen, or before."""
    async with a_turn_whose_trial_is_silent(held_s) as (gateway, engine, turn):
        await asyncio.sleep(0.1)
        engine.silent = False
        status, choice = await turn
        assert (status, choice["finish_reason"], choice["fault"]) == (200, "length", "")
        assert choice["token_ids"] == continued(PROMPT, 60, version=1)
        assert gateway.scheduler.blame.policy.idle


async def test_a_turn_on_trial_is_refused_once_its_silent_engine_proves_dead() -> None:
    async with a_turn_whose_trial_is_silent(1.0) as (_, engine, turn):
        engine.instance, engine.silent = "another", False
        status, choice = await turn
        assert (status, choice["finish_reason"]) == (200, "abort")
        assert "failed twice under this request" in choice["fault"]


async def test_a_turn_is_not_blamed_for_an_engine_whose_streams_break_and_that_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeated_deaths, "HELD_S", 0.0)
    engine = fake()
    async with gateway_on(engine) as gateway:
        await gateway.publish(1)
        gateway.scheduler.blame.policy = BlamePolicy(quiet_s=0, held_s=0)
        engine.breaks_after, engine.breaks = 2, 20
        status, choice = await gateway.generate("t", 40)
        assert (status, choice["finish_reason"], choice["fault"]) == (200, "length", "")
        assert choice["token_ids"] == continued(PROMPT, 40, version=1)
