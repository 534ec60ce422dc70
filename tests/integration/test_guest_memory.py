"""A real guest gives its KV back to the operating system, and computes as before."""

from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import GrantMode
from tests.integration.engine_slot import CONTEXT_TOKENS, EngineSlot, until

pytestmark = pytest.mark.engine

LONG = 1200


@pytest.fixture
async def slot(engine_slot: EngineSlot) -> AsyncIterator[EngineSlot]:
    engine_slot.agent.raise_epoch()
    engine_slot.agent.say(GrantMode.UNGATED)
    await engine_slot.guest_becomes(lambda guest: guest.kv_tokens_withheld == 0, "it has all")
    yield engine_slot
    engine_slot.agent.raise_epoch()
    engine_slot.agent.say(GrantMode.UNGATED)
    await engine_slot.guest_becomes(
        lambda guest: guest.running == 0 and guest.kv_tokens_withheld == 0, "nothing is left"
    )


def resident_bytes(slot: EngineSlot) -> int:
    return sum(process.memory_info().rss for process in slot.guest_child.tree())


async def filled(slot: EngineSlot) -> int:
    """Write to blocks that no turn before has used. Returns about how many bytes."""
    length, prompts = CONTEXT_TOKENS - 96, range(16)
    for _ in prompts:
        rng = Random(monotonic_ns())
        prompt = tuple(rng.choices(range(5, 21), k=length))
        turn = await slot.begin(1, prompt=prompt).ended()
        assert len(turn.tokens) == 1
    kv_bytes_per_token = (1 << 30) / slot.guest().kv_tokens_total
    return int(length * len(prompts) * kv_bytes_per_token)


async def test_a_smaller_budget_returns_memory_and_leaves_a_running_turn_as_it_is(
    slot: EngineSlot,
) -> None:
    undisturbed = await slot.begin(LONG).ended()
    written = await filled(slot)
    assert written > 32 << 20
    turn = slot.begin(LONG)
    await until(lambda: len(turn.tokens) > 50, "it is under way")
    before = resident_bytes(slot)
    slot.agent.say(GrantMode.UNGATED, kv_budget_tokens=CONTEXT_TOKENS)
    await slot.guest_becomes(lambda guest: guest.kv_tokens_withheld, "the budget is obeyed")
    guest = slot.guest()
    assert guest.kv_tokens_total - guest.kv_tokens_withheld <= CONTEXT_TOKENS
    # The turn's own blocks stay, and so do cached prefixes within the budget.
    assert before - resident_bytes(slot) > 0.7 * written
    await turn.ended()
    assert turn.tokens == undisturbed.tokens
    assert turn.logprobs == undisturbed.logprobs


async def test_a_guest_asleep_holds_no_kv_and_wakes_to_the_same_answers(slot: EngineSlot) -> None:
    undisturbed = await slot.begin(40).ended()
    turn = slot.begin(LONG)
    await until(lambda: turn.tokens, "it is under way")
    slot.agent.say(GrantMode.CLOSED, asleep=True)
    await turn.ended()
    assert turn.aborted
    await slot.guest_becomes(
        lambda guest: guest.kv_tokens_withheld == guest.kv_tokens_total, "everything is returned"
    )
    asleep = resident_bytes(slot)
    slot.agent.say(GrantMode.UNGATED)
    awake = await slot.begin(40).ended()
    assert (awake.tokens, awake.logprobs) == (undisturbed.tokens, undisturbed.logprobs)
    # The cache is there again, and takes memory only where it was written to.
    assert resident_bytes(slot) - asleep < 64 << 20


async def test_a_turn_that_the_budget_cannot_hold_ends_with_what_it_has(slot: EngineSlot) -> None:
    turn = slot.begin(LONG)
    await until(lambda: len(turn.tokens) > 200, "it holds more than the budget to come")
    slot.agent.say(GrantMode.UNGATED, kv_budget_tokens=128)
    await turn.ended()
    assert turn.aborted
    assert len(turn.tokens) > 200
    short = await slot.begin(8).ended()
    assert len(short.tokens) == 8, "what fits goes on"
    grown = await slot.begin(LONG).ended()
    assert grown.aborted, "what outgrows it does not wait for ever"
    assert 0 < len(grown.tokens) < LONG


async def test_the_budget_holds_after_every_prefix_was_dropped(slot: EngineSlot) -> None:
    slot.agent.say(GrantMode.UNGATED, kv_budget_tokens=CONTEXT_TOKENS)
    await slot.guest_becomes(lambda guest: guest.kv_tokens_withheld, "the budget is obeyed")
    withheld = slot.guest().kv_tokens_withheld
    await slot.drop_prefixes()
    await slot.begin(8).ended()
    assert slot.guest().kv_tokens_withheld == withheld


async def computed_tokens(slot: EngineSlot, **request: Any) -> int:
    """Tokens computed by the guest's steps for one turn, prompt and output."""
    before = (await slot.idle_guest()).tokens_total
    turn = await slot.begin(16, **request).ended()
    assert len(turn.tokens) == 16
    return (await slot.idle_guest()).tokens_total - before


async def prefix_then_flood(slot: EngineSlot, *, kv_retained_ratio: float) -> dict[str, Any]:
    """A turn, then other turns of more KV than there is. Returns the trajectory's next turn."""
    slot.agent.say(
        GrantMode.UNGATED, kv_budget_tokens=2 * CONTEXT_TOKENS, kv_retained_ratio=kv_retained_ratio
    )
    await slot.guest_becomes(lambda guest: guest.kv_tokens_withheld, "the budget is obeyed")
    rng = Random(monotonic_ns())
    context = tuple(rng.choices(range(5, 21), k=1500))
    assert await computed_tokens(slot, prompt=context, trajectory="t", salt="version-1") > 1500
    for _ in range(8):
        flood = tuple(rng.choices(range(5, 21), k=1900))
        await computed_tokens(slot, prompt=flood, salt="version-1")
    return {"prompt": context + context[:100], "trajectory": "t"}


async def test_a_prefix_survives_a_flood_while_its_trajectory_s_tool_runs(
    slot: EngineSlot,
) -> None:
    following = await prefix_then_flood(slot, kv_retained_ratio=0.25)
    assert 1400 < slot.guest().kv_tokens_retained <= CONTEXT_TOKENS // 2
    used = slot.guest().prefix_tokens_used_total
    assert await computed_tokens(slot, **following, salt="version-1") < 300
    assert slot.guest().prefix_tokens_used_total - used > 1400
    # KV of another version is no prefix for this one, kept or not.
    dropped = slot.guest().prefix_tokens_dropped_total
    assert await computed_tokens(slot, **following, salt="version-2") > 1500
    await slot.guest_becomes(lambda guest: guest.kv_tokens_retained > 1400, "its own is kept")
    slot.agent.say(GrantMode.UNGATED, kv_budget_tokens=256, kv_retained_ratio=0.25)
    await slot.guest_becomes(
        lambda guest: guest.prefix_tokens_dropped_total - dropped > 2 * 1400, "both are dropped"
    )
    assert slot.guest().kv_tokens_retained == 0


async def test_without_retention_the_flood_takes_the_prefix(slot: EngineSlot) -> None:
    following = await prefix_then_flood(slot, kv_retained_ratio=0.0)
    assert slot.guest().kv_tokens_retained == 0
    assert await computed_tokens(slot, **following, salt="version-1") > 1500
