"""A real production engine's pulse: it beats while idle and counts what happens, no more."""

import asyncio
import math
import re

import aiohttp
import pytest

from harvester.agent.engine_probes import narrowed, read_metrics
from harvester.contracts.page import GrantMode, PageReader, Pulse
from tests.integration.engine_slot import (
    FAKE_PULSE,
    PRODUCTION,
    PRODUCTION_PULSE,
    EngineSlot,
    completed,
    until,
)

pytestmark = pytest.mark.engine


async def complete(slot: EngineSlot, max_tokens: int) -> int:
    return await completed(slot.production_url, PRODUCTION, max_tokens)


def leave_no_slack_while_decoding(slot: EngineSlot, *pulses: str) -> None:
    """None at all while an engine of these decodes; ten seconds of it while all are idle."""
    slot.agent.raise_epoch()
    slot.agent.say(GrantMode.OPEN, ttft_slo_s=10.0, itl_slo_s=0.0, epsilon=math.inf, pulses=pulses)


async def fresh_stamp_ns(reader: PageReader[Pulse], *, after_ns: int = 0) -> int:
    await until(
        lambda: reader.read().record is not None and reader.read().stamp_ns > after_ns,
        "the pulse is fresh",
    )
    return reader.read().stamp_ns


async def test_an_idle_engine_beats(engine_slot: EngineSlot) -> None:
    reader = engine_slot.pages.pulse_reader(PRODUCTION_PULSE)
    first_ns = await fresh_stamp_ns(reader)
    steps = engine_slot.pulse().steps_total
    later_ns = await fresh_stamp_ns(reader, after_ns=first_ns + 500_000_000)
    assert later_ns > first_ns
    pulse = engine_slot.pulse()
    assert (pulse.in_flight, pulse.waiting, pulse.decoding) == (0, 0, 0)
    assert pulse.steps_total == steps
    # float32 on a CPU without fast bf16.
    assert re.match(r"Qwen2ForCausalLM 2x128 (bfloat16|float32) tp1 pp1 on ", pulse.shape)


async def test_a_request_is_in_flight_from_its_arrival_to_its_last_byte(
    engine_slot: EngineSlot,
) -> None:
    before = engine_slot.pulse()
    request = asyncio.create_task(complete(engine_slot, 1000))
    await until(lambda: engine_slot.pulse().in_flight == 1, "the request is in flight")
    await until(lambda: engine_slot.pulse().decoding == 1, "its first token is out")
    assert engine_slot.pulse().waiting == 0
    assert await request == 1000
    await until(lambda: engine_slot.pulse().in_flight == 0, "nothing is in flight")
    after = engine_slot.pulse()
    assert (after.decoding, after.running) == (0, 0)
    assert after.requests_total == before.requests_total + 1
    assert after.samples_total == before.samples_total + 1
    assert after.unanswered_total == before.unanswered_total
    assert after.generation_tokens_total == before.generation_tokens_total + 1000
    assert after.steps_total >= before.steps_total + 1000
    assert after.busy_s_total > before.busy_s_total
    assert after.step_s_mean > 0


async def test_a_client_that_goes_amid_its_reply_leaves_an_engine_that_says_it_is_idle(
    engine_slot: EngineSlot,
) -> None:
    before = engine_slot.pulse()
    assert before.middleware is True
    for _ in range(3):
        request = asyncio.create_task(complete(engine_slot, 3000))
        await until(lambda: engine_slot.pulse().decoding == 1, "its first token is out")
        assert [core.running for core in engine_slot.pulse().cores] == [1]
        request.cancel()
        await until(lambda: engine_slot.pulse().in_flight == 0, "nothing is in flight")
        await until(
            lambda: not any(core.running for core in engine_slot.pulse().cores),
            "the engine holds nothing",
            seen=engine_slot.pulse,
        )
    assert engine_slot.pulse().unseen_steps_total <= before.unseen_steps_total + 3


async def test_a_guest_takes_no_step_while_production_has_no_slack(
    engine_slot: EngineSlot,
) -> None:
    slot = engine_slot
    leave_no_slack_while_decoding(slot, PRODUCTION_PULSE)
    assert len((await slot.begin(4).ended()).tokens) == 4
    quiet = asyncio.Event()

    async def follow_one_another(max_tokens: int) -> None:
        while not quiet.is_set():
            await complete(slot, max_tokens)

    # Unequal lengths: one client decodes while the next request of another begins.
    clients = [asyncio.create_task(follow_one_another(length)) for length in (1700, 2300, 2900)]
    await until(lambda: slot.pulse().decoding == 3, "production decodes", seen=slot.pulse)
    turn = slot.begin(40)
    await slot.guest_becomes(
        lambda guest: guest.waiting == 1 and guest.reason == "no_slack", "the guest waits"
    )
    steps = slot.guest().steps_launched
    await asyncio.sleep(1.0)
    assert (turn.tokens, slot.guest().steps_launched) == ([], steps)
    quiet.set()
    await asyncio.gather(*clients)
    assert len((await turn.ended()).tokens) == 40


async def test_each_of_two_engines_on_a_slot_stops_the_guest_while_the_other_is_idle(
    engine_slot: EngineSlot,
) -> None:
    """The second engine is a page that beats, idle."""
    slot = engine_slot
    leave_no_slack_while_decoding(slot, FAKE_PULSE, PRODUCTION_PULSE)
    assert len((await slot.begin(4).ended()).tokens) == 4
    busy = asyncio.create_task(complete(slot, 3000))
    await until(lambda: slot.pulse().decoding == 1, "one engine decodes", seen=slot.pulse)
    turn = slot.begin(40)
    await slot.guest_becomes(
        lambda guest: guest.waiting == 1 and guest.reason == "no_slack", "the guest waits"
    )
    assert await busy == 3000
    assert len((await turn.ended()).tokens) == 40
    slot.agent.stop_pulse()
    try:
        await slot.guest_becomes(lambda guest: guest.reason == "expired", "the other is missed")
        turn = slot.begin(40)
        await slot.guest_becomes(lambda guest: guest.waiting == 1, "the guest waits for it")
        assert turn.tokens == []
    finally:
        slot.agent.restart_pulse()
    assert len((await turn.ended()).tokens) == 40


async def test_the_scrape_makes_the_engine_write_out_few_series(engine_slot: EngineSlot) -> None:
    before = engine_slot.pulse()
    assert await complete(engine_slot, 8) == 8
    page = narrowed(f"{engine_slot.production_url}/metrics")
    async with aiohttp.ClientSession() as session, session.get(page) as reply:
        text = await reply.text()
    levels = read_metrics(text)
    assert levels is not None
    assert levels.generation_tokens_total >= before.generation_tokens_total + 8
    assert sum(not line.startswith("#") for line in text.splitlines()) == 5
