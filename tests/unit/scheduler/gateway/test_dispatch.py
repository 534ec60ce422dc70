"""The wait for a place: how long it lasts over arrivals that differ."""

import asyncio
from typing import Any

import pytest

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engine_registry import EngineRegistry
from scheduler.gateway.fleet_member import FleetMember
from scheduler.gateway.policy.course import EngineWait, TurnCourse
from scheduler.gateway.policy.routing import RoutingPolicy
from scheduler.gateway.policy.routing_events import (
    DispatchTurn,
    EngineOffered,
    JobPaused,
    Refusal,
    RefuseTurn,
    RoutingConfig,
    TurnLeft,
)
from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.policy.versions_events import Retarget
from scheduler.model import Engine, EngineKind
from tests.unit.scheduler.gateway.registry import registry_of

JOB = JobId("job")
QUEUE_S = 0.4


def make(registry: EngineRegistry | None = None) -> Dispatcher:
    made = Dispatcher(
        RoutingPolicy(RoutingConfig()),
        registry or registry_of(JOB),
        MonotonicClock(),
        queue_s=QUEUE_S,
        queued=asyncio.Event(),
    )
    made.observe(Retarget(job=JOB, version=WeightVersion(1)))
    return made


@pytest.fixture
def dispatcher() -> Dispatcher:
    return make()


def turn(name: str) -> Turn:
    request = GenerateRequest(
        request_id=name, token_ids=(1,), sampling_params=SamplingParams(max_tokens=4)
    )
    opened = TurnLedger(JOB).open(request, trajectory=TrajectoryId(name))
    assert opened is not None
    return opened


def offer(engine: EngineId) -> EngineOffered:
    return EngineOffered(
        engine=engine,
        kind=EngineKind.DEDICATED,
        concurrency=1,
        job=JOB,
        version=WeightVersion(1),
    )


async def place(dispatcher: Dispatcher, name: str, wait: EngineWait, for_s: float) -> Any:
    until_s = MonotonicClock().now() + for_s
    avoid = (EngineId("away"),)
    return await dispatcher.place(turn(name), TurnCourse(wait=wait), avoid=avoid, until_s=until_s)


async def test_a_turn_that_no_engine_may_serve_is_refused_however_often_it_is_looked_at(
    dispatcher: Dispatcher,
) -> None:
    wait = EngineWait()
    async with asyncio.timeout(30):
        while (placed := await place(dispatcher, "t", wait, QUEUE_S / 4)) is None:
            pass
    assert isinstance(placed, RefuseTurn)
    assert placed.refusal is Refusal.UNSERVED


async def test_a_refusal_says_the_fault_of_an_engine() -> None:
    registry = registry_of(JOB)
    name = EngineId("e0")
    engine = Engine(engine=name, kind=EngineKind.DEDICATED, url="", concurrency=1, numerics="")
    registry.members[name] = FleetMember(engine, client=None, fault="cannot serve job")  # type: ignore[arg-type]
    dispatcher = make(registry)
    refused = await place(dispatcher, "r", EngineWait(), 60.0)
    assert refused.reason.endswith("for 0 s; engine e0: cannot serve job")


async def test_an_engine_that_the_turn_must_not_be_on_does_not_count_as_one_to_wait_for(
    dispatcher: Dispatcher,
) -> None:
    unfit = EngineId("unfit")
    dispatcher.observe(offer(unfit))
    until_s = MonotonicClock().now() + 60.0
    placed = await dispatcher.place(
        turn("t"), TurnCourse(), avoid=(unfit,), unfit={unfit}, until_s=until_s
    )
    assert isinstance(placed, RefuseTurn)
    assert placed.refusal is Refusal.UNSERVED
    waits = dispatcher.place(turn("t"), TurnCourse(), avoid=(unfit,), until_s=until_s)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2 * QUEUE_S):
            await waits


@pytest.mark.parametrize("by", ["permit", "pause", "engines"])
async def test_a_wait_for_a_permit_or_a_pause_is_counted_apart(by: str) -> None:
    registry = registry_of(JOB)
    registry.parked.update({JOB} if by == "permit" else ())
    wait, dispatcher = EngineWait(), make(registry)
    dispatcher.observe(JobPaused(job=JOB, paused=by == "pause"))
    began_s = MonotonicClock().now()
    waiting = asyncio.create_task(place(dispatcher, "t", wait, 60.0))
    await asyncio.sleep(QUEUE_S / 2)
    dispatcher.observe(JobPaused(job=JOB, paused=False))
    dispatcher.observe(offer(EngineId("e")))
    assert isinstance(await waiting, DispatchTurn)
    passed_s = MonotonicClock().now() - began_s
    low, high = (0.0, 0.0) if by == "engines" else (QUEUE_S / 4, passed_s)
    assert low <= wait.barred_s <= high


async def test_a_turn_that_comes_again_is_placed_before_those_that_came_meanwhile(
    dispatcher: Dispatcher,
) -> None:
    wait = EngineWait()
    assert await place(dispatcher, "first", wait, 0.02) is None
    second = asyncio.create_task(place(dispatcher, "second", EngineWait(), 10.0))
    await asyncio.sleep(0)
    first = asyncio.create_task(place(dispatcher, "first", wait, 10.0))
    await asyncio.sleep(0)
    dispatcher.observe(offer(EngineId("e")))
    async with asyncio.timeout(30):
        assert isinstance(await first, DispatchTurn)
    assert not second.done()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)


async def test_the_end_refuses_all_that_wait_and_leaves_nothing_in_the_queue(
    dispatcher: Dispatcher,
) -> None:
    dispatcher.observe(offer(EngineId("e")))
    assert isinstance(await place(dispatcher, "runs", EngineWait(), 10.0), DispatchTurn)
    waiting = [
        asyncio.create_task(place(dispatcher, f"t{number}", EngineWait(), 10.0))
        for number in range(3000)
    ]
    await asyncio.sleep(0)
    assert dispatcher.policy.queued_turns == 3000
    dispatcher.close()
    assert dispatcher.policy.queued_turns == 0
    dispatcher.observe(TurnLeft(turn=turn("runs").key))
    placed = await asyncio.gather(*waiting)
    assert all(isinstance(each, RefuseTurn) for each in placed)
    assert dispatcher.policy.open_turns == 0
