"""A real guest obeys its slot's pages: grant, pulse, epoch, and its return of memory without
them."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import GrantMode, ProductionModel
from tests.integration.engine_slot import FAKE_PULSE, EngineSlot, Turn, until

pytestmark = pytest.mark.engine

# Short enough to expire while a turn of LONG tokens runs, on any machine.
EXPIRY_S = 0.3
LONG = 1500
# With these, a fresh and idle pulse leaves ten seconds of slack, which admits any step.
SLACK = {"ttft_slo_s": 10.0, "itl_slo_s": 10.0, "epsilon": math.inf, "pulses": (FAKE_PULSE,)}


@pytest.fixture
async def slot(engine_slot: EngineSlot) -> AsyncIterator[EngineSlot]:
    """An epoch of its own, ungated; nothing of an earlier test is left in the guest."""
    engine_slot.agent.raise_epoch()
    engine_slot.agent.say(GrantMode.UNGATED)
    yield engine_slot
    engine_slot.agent.raise_epoch()
    engine_slot.agent.say(GrantMode.UNGATED)
    await engine_slot.guest_becomes(
        lambda guest: guest.running == 0, "the guest has ended every request"
    )


async def started(slot: EngineSlot, max_tokens: int) -> Turn:
    turn = slot.begin(max_tokens)
    await until(lambda: turn.tokens, "first tokens came")
    return turn


async def steps_stand_still(slot: EngineSlot, *, for_s: float = 1.0) -> int:
    """Steps launched in all, once they are the same after a while as before it."""
    steps = -1
    for _ in range(20):
        if (seen := slot.guest().steps_launched) == steps:
            return steps
        steps = seen
        await asyncio.sleep(for_s)
    pytest.fail("the guest goes on stepping")


async def test_with_a_grant_it_generates_tokens_with_their_logprobs(slot: EngineSlot) -> None:
    before = slot.guest()
    turn = await slot.begin(40).ended()
    assert (turn.status, turn.finish_reason, turn.whole) == (200, "length", True)
    assert len(turn.tokens) == len(turn.logprobs) == 40
    assert all(-9999 <= logprob <= 0 for logprob in turn.logprobs)
    await slot.guest_becomes(
        lambda guest: guest.tokens_total >= before.tokens_total + 40, "it is accounted"
    )
    assert slot.guest().epoch == slot.agent.epoch


async def test_a_guest_whose_steps_delay_arrivals_rests_between_them_and_ends_its_turn(
    slot: EngineSlot,
) -> None:
    began_ns = monotonic_ns()
    await slot.begin(60).ended()
    step_s = (monotonic_ns() - began_ns) / 60e9
    epsilon = 0.01
    # Arrivals bear less than one step in the mean; with a rest they bear up to six times as much.
    production = ProductionModel(prefill_base_s=0.4 * step_s / epsilon)
    slot.agent.say(
        GrantMode.OPEN,
        ttft_slo_s=10.0,
        itl_slo_s=10.0,
        epsilon=epsilon,
        blocking_ratio=1.0,
        production=production,
        pulses=(FAKE_PULSE,),
    )
    before = slot.guest()
    # Long enough for the page to show a rest: it is written every 50 ms.
    turn = await started(slot, 300)
    await slot.guest_becomes(lambda guest: guest.reason == "resting", "it rests")
    await turn.ended()
    assert (turn.finish_reason, len(turn.tokens)) == ("length", 300)
    assert (await slot.idle_guest()).steps_finished - before.steps_finished >= 300
    # The page renews what is lent once a second: the turn may end before it has.
    await slot.guest_becomes(lambda guest: guest.lending.tokens > 0, "its lending is told")
    assert slot.guest().lending.share_ratio < 0.34


@pytest.mark.parametrize("unlink", [False, True], ids=["silent", "page_removed"])
async def test_without_its_agent_it_takes_no_step_and_goes_on_when_one_is_back(
    slot: EngineSlot, unlink: bool
) -> None:
    undisturbed = await slot.begin(LONG).ended()
    slot.agent.say(GrantMode.UNGATED, ttl_s=EXPIRY_S)
    turn = await started(slot, LONG)
    expires_ns = slot.agent.fall_silent(unlink=unlink)
    await until(lambda: monotonic_ns() > expires_ns, "the grant has expired")
    steps = await steps_stand_still(slot)
    tokens = len(turn.tokens)
    guest = slot.guest()
    # The step in hand may end; its launch was before the expiry, so a second is more than it needs.
    assert guest.last_step_end_ns < expires_ns + 1_000_000_000
    assert guest.gate == "closed"
    assert guest.running == 1
    assert tokens < LONG
    refused = await slot.begin(4).ended()
    assert (refused.status, slot.guest().steps_launched) == (503, steps)
    slot.agent.come_back()
    slot.agent.say(GrantMode.UNGATED)
    await turn.ended()
    assert (turn.finish_reason, turn.whole) == ("length", True)
    assert turn.tokens == undisturbed.tokens
    assert turn.logprobs == undisturbed.logprobs


async def test_requests_wait_while_the_agent_keeps_the_gate_closed(slot: EngineSlot) -> None:
    slot.agent.say(GrantMode.CLOSED)
    steps = await steps_stand_still(slot)
    turn = slot.begin(8)
    await slot.guest_becomes(lambda guest: guest.waiting == 1, "the request waits")
    await asyncio.sleep(1.0)
    assert (turn.tokens, slot.guest().steps_launched) == ([], steps)
    assert slot.guest().reason == "grant_closed"
    slot.agent.say(GrantMode.UNGATED)
    assert len((await turn.ended()).tokens) == 8


async def test_after_the_grace_every_request_ends_with_what_it_has(slot: EngineSlot) -> None:
    aborted = slot.guest().aborted_total
    slot.agent.say(GrantMode.UNGATED, ttl_s=EXPIRY_S, abort_grace_s=0.5)
    turn = await started(slot, LONG)
    await slot.guest_becomes(lambda guest: guest.kv_tokens > 0, "it holds KV")
    slot.agent.fall_silent()
    await turn.ended()
    assert turn.aborted
    assert 0 < len(turn.tokens) < LONG
    assert len(turn.logprobs) == len(turn.tokens)
    await slot.guest_becomes(lambda guest: guest.kv_tokens == 0, "the KV is given back")
    assert slot.guest().running == 0
    assert slot.guest().aborted_total == aborted + 1


async def test_a_stale_epoch_is_refused(slot: EngineSlot) -> None:
    for stale in (slot.agent.epoch - 1, slot.agent.epoch + 1):
        turn = await slot.begin(4, epoch=stale).ended()
        assert (turn.status, turn.tokens) == (409, [])
        assert f"in force, {slot.agent.epoch}" in turn.said


async def test_a_raised_epoch_ends_the_turns_of_the_one_before(slot: EngineSlot) -> None:
    old = await started(slot, LONG)
    slot.agent.raise_epoch()
    slot.agent.say(GrantMode.UNGATED)
    new = await slot.begin(8).ended()
    await old.ended()
    assert (old.finish_reason, old.whole) == (None, False)
    assert 0 < len(old.tokens) < LONG
    assert (len(new.tokens), new.finish_reason) == (8, "length")
    await slot.guest_becomes(lambda guest: guest.running == 0, "the old turn holds nothing")


async def test_a_raised_epoch_takes_back_what_a_turn_without_a_stream_holds(
    slot: EngineSlot,
) -> None:
    old = slot.begin(LONG, stream=False)
    await slot.guest_becomes(lambda guest: guest.running == 1, "the turn is under way")
    slot.agent.raise_epoch()
    slot.agent.say(GrantMode.CLOSED)
    await old.ended()
    assert (old.status, old.tokens) == (409, [])
    await slot.guest_becomes(lambda guest: guest.kv_tokens == 0, "with its gate closed")


@pytest.mark.parametrize(
    ("fail", "reasons"),
    [
        (lambda slot: slot.agent.stop_pulse(), {"expired"}),
        (lambda slot: slot.agent.remove_pulse(), {"missing", "expired"}),
        (lambda slot: slot.agent.tear_pulse(), {"torn"}),
    ],
    ids=["silent", "missing", "torn"],
)
async def test_without_production_s_pulse_it_takes_no_step(
    slot: EngineSlot, fail: Callable[[EngineSlot], None], reasons: set[str]
) -> None:
    slot.agent.say(GrantMode.OPEN, **SLACK)
    turn = await started(slot, 3000)
    fail(slot)
    await slot.guest_becomes(lambda guest: guest.gate == "closed", "the gate closes")
    await steps_stand_still(slot)
    assert slot.guest().reason in reasons
    assert len(turn.tokens) < 3000
    slot.agent.restart_pulse()
    await turn.ended()
    assert (len(turn.tokens), turn.finish_reason) == (3000, "length")


async def test_a_closed_gate_with_a_waiting_request_costs_next_to_nothing(
    slot: EngineSlot,
) -> None:
    slot.agent.say(GrantMode.CLOSED)
    turn = slot.begin(4)
    await slot.guest_becomes(lambda guest: guest.waiting == 1, "the request waits")
    # Threads that woke for the request sleep again within vLLM's second of spinning.
    await asyncio.sleep(2.0)
    tree = slot.guest_child.tree()
    before_s = _cpu_s(tree)
    await asyncio.sleep(3.0)
    assert _cpu_s(tree) - before_s < 0.3 * 3.0
    slot.agent.say(GrantMode.UNGATED)
    assert len((await turn.ended()).tokens) == 4


async def test_the_groups_of_its_one_rank_look_after_one_device(slot: EngineSlot) -> None:
    names = [
        (task / "comm").read_text().strip()
        for process in slot.guest_child.tree()
        for task in Path(f"/proc/{process.pid}/task").iterdir()
    ]
    assert names.count("gloo_tcp_loop") == 1


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)
