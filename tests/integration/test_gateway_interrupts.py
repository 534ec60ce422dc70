"""A turn that loses its engine: its job decides, and the reply says how it ended."""

import asyncio
from typing import Any

import pytest

from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import (
    PROMPT,
    GatewayInProcess,
    continued,
    gateway_on,
)

PARTIAL = {"on_interrupt": "return_partial"}


def engine(**more: Any) -> FakeEngine:
    return FakeEngine(step_s=0.002, epoch=None, **more)


def interruptions(gateway: GatewayInProcess) -> dict[tuple[str, str], float]:
    """Number of interruptions, by cause and outcome."""
    (family,) = gateway.scheduler.metrics.interruptions.collect()
    return {
        (sample.labels["cause"], sample.labels["outcome"]): sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }


async def test_a_version_switch_returns_the_turns_whose_request_wants_that() -> None:
    async with gateway_on(engine()) as gateway:
        partial = asyncio.create_task(gateway.generate("r1", 200, **PARTIAL))
        whole = asyncio.create_task(gateway.generate("r2", 200))
        await gateway.until_tokens(2, turns=2)
        assert (await gateway.publish(1))[0] == 200
        status, choice = await partial
        assert (status, choice["finish_reason"]) == (200, "abort")
        assert choice["fault"].startswith("interrupted (switch)")
        assert choice["token_ids"] == continued(PROMPT, len(choice["token_ids"]), version=0)
        assert len((await whole)[1]["token_ids"]) == 200
        assert interruptions(gateway) == {("switch", "returned"): 1, ("switch", "continued"): 1}


async def test_the_request_s_say_counts_before_the_job_s() -> None:
    jobs = [{"id": "job", **PARTIAL}]
    async with gateway_on(engine(), jobs=jobs) as gateway:
        by_job = asyncio.create_task(gateway.generate("r1", 200))
        own = asyncio.create_task(gateway.generate("r2", 200, on_interrupt="continue"))
        await gateway.until_tokens(2, turns=2)
        assert (await gateway.publish(1))[0] == 200
        assert (await by_job)[1]["finish_reason"] == "abort"
        assert (await own)[1]["finish_reason"] == "length"
        status, reply = await gateway.generate("r3", 4, on_interrupt="retry")
        assert status == 400
        assert "on_interrupt" in reply["error"]["message"]


@pytest.mark.parametrize("tokens_before", [1, 3])
async def test_a_broken_engine_returns_a_turn_only_once_it_has_a_token(tokens_before: int) -> None:
    broken = engine()
    broken.breaks_after = tokens_before
    async with gateway_on(broken) as gateway:
        status, choice = await gateway.generate("r", 20, **PARTIAL)
        assert status == 200
        if tokens_before == 1:
            assert choice["token_ids"] == continued(PROMPT, 20, version=0), "tried again"
            assert interruptions(gateway) == {}
        else:
            assert choice["finish_reason"] == "abort"
            assert choice["token_ids"] == continued(PROMPT, tokens_before - 1, version=0)
            assert choice["fault"].startswith("interrupted (engine): e0")
            assert interruptions(gateway) == {("engine", "returned"): 1}


async def test_a_stall_and_an_engine_s_own_abort_are_interruptions() -> None:
    quick = {"stall_s": 0.2, "guest_tail_stall_s": 0.2}
    engines = [engine(), engine()]
    async with gateway_on(*engines, timeouts=quick) as gateway:
        work = asyncio.create_task(gateway.generate("r1", 100_000, **PARTIAL))
        await gateway.until_tokens(2)
        for each in engines:
            each.stalled = each.open > 0
        _, choice = await work
        assert choice["fault"].startswith("interrupted (stall)")
        for each in engines:
            each.stalled, each.ends_after = False, 3
        _, choice = await gateway.generate("r2", 20, **PARTIAL)
        assert choice["token_ids"] == continued(PROMPT, 3, version=0)
        assert choice["fault"].startswith("interrupted (abort)")
        assert interruptions(gateway) == {("stall", "returned"): 1, ("abort", "returned"): 1}


async def test_a_turn_that_cannot_move_says_so_and_ends_where_it_must() -> None:
    async with gateway_on(engine()) as gateway:
        sampling = {"stop": ["never"], "presence_penalty": 0.5}
        work = asyncio.create_task(gateway.generate("r", 200, sampling=sampling))
        await gateway.until_tokens(2)
        assert (await gateway.publish(1))[0] == 200
        _, choice = await work
        assert choice["immovable"] == ["presence_penalty", "stop"]
        assert choice["finish_reason"] == "abort"
        assert "counts output (presence_penalty, stop)" in choice["fault"]
        assert (await gateway.generate("free", 4))[1]["immovable"] == []


async def test_a_turn_that_cannot_move_begins_on_no_guest_that_joined_while_it_waited() -> None:
    guest = FakeEngine(step_s=0.002, epoch="1")
    async with gateway_on(engine()) as gateway:
        running = [asyncio.create_task(gateway.generate(f"r{n}", 100_000)) for n in range(8)]
        await gateway.until_tokens(2, turns=8)
        bound = asyncio.create_task(gateway.generate("bound", 4, sampling={"stop": ["never"]}))
        await gateway.until(lambda: gateway.scheduler.dispatcher.policy.queued_turns)
        place = await gateway.add_guest(guest)
        assert (await gateway.generate("free", 4))[1]["spans"][0]["engine"] == place
        assert len(guest.extra_args) == 1, "the turn that has waited longer did not begin there"
        await gateway.post("/abort_requests", {"request_ids": [f"r{n}" for n in range(8)]})
        _, choice = await bound
        assert choice["spans"][0]["engine"] == "e0"
        assert choice["immovable"] == ["stop"]
        await asyncio.gather(*running)
