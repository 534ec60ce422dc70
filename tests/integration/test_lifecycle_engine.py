"""The control routes on a real guest: updates, pauses, aborts and interruptions of its turns.

Waits are for facts and long: a busy machine makes the test slow and not red.
"""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harvester.contracts.page import GrantMode
from tests.integration.conftest import FakeAgent
from tests.integration.engine_slot import EngineSlot
from tests.integration.gateway_in_process import GatewayInProcess, gateway_on
from tests.integration.test_guest_weights import State, first_state, next_state

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STORE = "lifecycle"
LONG, SHORT = 3000, 40
WITHIN_S = 120.0


class Job:
    """A trainer and its rollouts at a gateway whose only engine is the slot's guest."""

    def __init__(self, gateway: GatewayInProcess, slot: EngineSlot) -> None:
        from weightsync.publisher import Publisher

        self.gateway = gateway
        self._slot = slot
        self._publisher = Publisher(Path(slot.weights) / STORE)
        self._state: State = first_state()
        self._version = 0

    def turn(self, name: str, tokens: int, **more: Any) -> "asyncio.Task[tuple[int, Any]]":
        sampling = {"temperature": 0.0, "ignore_eos": True}
        return asyncio.create_task(self.gateway.generate(name, tokens, sampling=sampling, **more))

    async def control(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        status, reply = await self.gateway.post(path, body or {})
        assert status == 200, reply
        return dict(reply)

    async def update(self) -> None:
        """The next version, by the calls of vLLM's own client; the guest follows it."""
        self._publisher.publish(self._state)
        self._state, self._version = next_state(self._state), self._version + 1
        info = {"update_info": {"store": STORE, "version": self._version}}
        await self.control("/init_weight_transfer_engine", {"init_info": {}})
        await self.control("/start_weight_update")
        await self.control("/update_weights", info)
        await self.control("/finish_weight_update", {"weight_version": str(self._version)})
        await self.control("/update_weight_version", {"new_version": str(self._version)})

    async def tokens(self, count: int, *, turns: int = 1) -> None:
        ledger = self.gateway.scheduler.ledgers["job"]

        def made() -> bool:
            return sum(len(turn.token_ids) >= count for turn in ledger.turns()) >= turns

        await self.gateway.until(made, timeout_s=WITHIN_S)

    async def engine_is_empty(self) -> None:
        await self._slot.guest_becomes(lambda guest: not guest.running, "no turn runs")

    def close(self) -> None:
        self._publisher.close()


@pytest.fixture
async def job(engine_slot: EngineSlot, fake_agent: FakeAgent) -> AsyncIterator[Job]:
    slot = engine_slot
    # The lease has the epoch that the grant is given now.
    fake_agent.engine_url, fake_agent.epoch = slot.guest_url, slot.agent.epoch
    slot.agent.raise_epoch()
    slot.agent.say(GrantMode.UNGATED)
    patient = {
        "guest_stall_s": WITHIN_S,
        "guest_tail_stall_s": WITHIN_S,
        "silence_s": WITHIN_S,
        "queue_s": WITHIN_S,
    }
    async with gateway_on(
        engines=[],
        agents=[{"id": "agent", "url": fake_agent.url}],
        capacity_period_s=0.1,
        capacity={"duration_s": 600.0, "margin_s": 1.0},
        timeouts=patient,
    ) as gateway:
        made = Job(gateway, slot)
        yield made
        made.close()


def versions_of(choice: Any) -> list[int]:
    """Versions of the spans, which cover all tokens."""
    spans = choice["spans"]
    assert (spans[0]["start"], spans[-1]["end"]) == (0, len(choice["token_ids"]))
    assert all(left["end"] == right["start"] for left, right in pairwise(spans))
    return sorted({span["version"] for span in spans})


async def test_updates_pauses_aborts_and_interruptions_reach_a_real_engine(job: Job) -> None:
    await job.update()

    kept = job.turn("kept", SHORT * 4)
    await job.tokens(4)
    await job.control("/pause?mode=keep")
    await job.engine_is_empty()
    await job.update()
    assert not kept.done()
    await job.control("/resume")
    status, choice = await kept
    assert (status, choice["finish_reason"]) == (200, "length"), choice
    assert len(choice["token_ids"]) == SHORT * 4
    assert versions_of(choice) == [1, 2]

    aborted = job.turn("aborted", LONG)
    await job.tokens(4)
    await job.control("/pause")
    status, choice = await aborted
    assert (status, choice["finish_reason"], versions_of(choice)) == (200, "abort", [2])
    await job.engine_is_empty()
    late = job.turn("late", SHORT)
    assert await job.gateway.get("/is_paused") == (200, {"is_paused": True})
    await job.control("/resume")
    assert (await late)[1]["finish_reason"] == "length"

    ending = job.turn("ending", SHORT)
    await job.tokens(1)
    await job.control("/pause?mode=wait")
    assert ending.done() or job.gateway.scheduler.dispatcher.policy.open_turns == 0
    assert (await ending)[1]["finish_reason"] == "length"
    await job.control("/continue_generation")

    named, beside = job.turn("named", LONG), job.turn("beside", LONG)
    await job.tokens(4, turns=2)
    assert (await job.control("/abort_requests", {"request_ids": ["named"]}))["aborted"] == 1
    status, choice = await named
    assert (choice["finish_reason"], choice.get("fault", "")) == ("abort", "")
    assert len(choice["token_ids"]) >= 4
    assert not beside.done()
    assert (await job.control("/abort_request", {"abort_all": True}))["aborted"] == 1
    assert (await beside)[1]["finish_reason"] == "abort"
    await job.engine_is_empty()

    partial = job.turn("partial", LONG, on_interrupt="return_partial")
    going_on = job.turn("going-on", LONG)
    await job.tokens(4, turns=2)
    await job.update()
    status, choice = await partial
    assert (choice["finish_reason"], versions_of(choice)) == ("abort", [2])
    assert "switch" in choice["fault"]
    before = len(choice["token_ids"])
    await job.tokens(before + 200)
    await job.control("/abort_requests", {"request_ids": ["going-on"]})
    assert versions_of((await going_on)[1]) == [2, 3]
    await job.engine_is_empty()
