"""The fleet's engines between the placement of a turn and its first attempt."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from harvester.contracts.ids import EngineId, JobId, SlotId, TrajectoryId, WeightVersion
from harvester.contracts.wire.engines import FIRST_CORE_FEATURE, EngineDescription
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams
from scheduler.decision_log import DecisionLog
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.engine_probing import EngineProbing
from scheduler.gateway.engines.engine_faults import EngineLost, EngineUnreachable
from scheduler.gateway.engines.identity import Change
from scheduler.gateway.fleet_member import FleetMember
from scheduler.gateway.gateway_metrics import GatewayMetrics
from scheduler.gateway.policy.routing import RoutingPolicy
from scheduler.gateway.policy.routing_events import RoutingConfig
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.policy.versions import VersionPolicy
from scheduler.gateway.policy.versions_events import (
    JobActivated,
    JobVersion,
    TimePassed,
    VersionPublished,
    VersionsConfig,
)
from scheduler.gateway.request_blame import RequestBlame
from scheduler.gateway.running_attempt import CutReason, RunningAttempt
from scheduler.model import Engine, EngineKind
from tests.unit.scheduler.gateway.registry import registry_of
from tests.virtual_clock import VirtualClock

JOB, ENGINE = JobId("job"), EngineId("e0")


@dataclass
class Client:
    """An engine that takes every version at once."""

    described: EngineDescription = field(default_factory=EngineDescription)
    state_hash: str = ""
    fault: Exception | None = None
    """Raised by the next switch."""

    def close(self) -> None:
        pass

    process = frozenset[str]()

    async def describe(self, guest_of: SlotId | None) -> EngineDescription:
        return self.described

    async def switch(self, *_: Any, **__: Any) -> EngineDescription:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        return self.described

    async def became(self) -> Change:
        return Change.UNKNOWN

    def forget(self) -> None:
        pass


def _running() -> RunningAttempt:
    request = GenerateRequest(
        request_id="t", token_ids=(1,), sampling_params=SamplingParams(max_tokens=1)
    )
    turn = TurnLedger(JOB).open(request, trajectory=TrajectoryId("t"))
    assert turn is not None
    return RunningAttempt(turn, began_s=0.0, chunk_at_s=0.0)


def _version(number: int) -> JobVersion:
    return JobVersion(job=JOB, store="s" if number else "", version=WeightVersion(number))


def _fleet(clock: VirtualClock, blame: RequestBlame | None = None) -> EngineFleet:
    versions = VersionPolicy(VersionsConfig(min_dedicated=1))
    log = DecisionLog(None, versions, {}, max_bytes=1 << 16, now=0.0)
    registry, routing = registry_of(JOB, versions=versions), RoutingPolicy(RoutingConfig())
    dispatcher = Dispatcher(routing, registry, clock, queue_s=60, queued=asyncio.Event())
    return EngineFleet(
        registry, dispatcher, blame or RequestBlame(), log, GatewayMetrics(), clock, update_s=1
    )


def _joined(fleet: EngineFleet, client: Any, engine: EngineId, kind: EngineKind) -> FleetMember:
    member = fleet.add(
        Engine(engine=engine, kind=kind, url="", concurrency=4, numerics="n"), client
    )
    fleet.up(member)
    return member


async def test_a_turn_begins_only_where_the_version_that_it_was_placed_at_is_still_served() -> None:
    fleet = _fleet(VirtualClock())
    fleet.switching.observe(JobActivated(job=JOB))
    member = _joined(fleet, Client(), ENGINE, EngineKind.DEDICATED)
    assert await fleet.switching.settled(_version(0), timeout_s=5)

    placed_at, first = WeightVersion(0), _running()
    assert fleet.began(ENGINE, first, placed_at) is member
    fleet.ended(member, first)

    fleet.switching.observe(VersionPublished(job=JOB, store="s", version=WeightVersion(1)))
    assert fleet.began(ENGINE, _running(), placed_at) is None
    assert await fleet.switching.settled(_version(1), timeout_s=5)
    assert fleet.began(ENGINE, _running(), placed_at) is None
    assert not member.running
    assert fleet.began(ENGINE, _running(), WeightVersion(1)) is member
    await fleet.close()
    await asyncio.sleep(0)


async def test_a_guest_beside_which_another_model_joins_goes_and_its_turns_are_not_to_blame() -> (
    None
):
    fleet = _fleet(VirtualClock())
    fleet.switching.observe(JobActivated(job=JOB))
    guest = _joined(
        fleet, Client(EngineDescription(vocabulary=32)), EngineId("g0"), EngineKind.GUEST
    )
    first = _joined(fleet, Client(), ENGINE, EngineKind.DEDICATED)
    assert await fleet.switching.settled(_version(0), timeout_s=5)
    await asyncio.gather(*fleet._tasks)
    running = _running()
    assert fleet.began(EngineId("g0"), running, WeightVersion(0)) is guest
    running.task = asyncio.ensure_future(asyncio.sleep(60))

    _joined(fleet, Client(EngineDescription(vocabulary=64)), EngineId("e1"), EngineKind.DEDICATED)
    await asyncio.gather(*fleet._tasks)
    assert (first.up, guest.up) == (True, False)
    assert "vocabulary 32, not 64" in guest.fault
    assert running.why_cut is CutReason.CLASH
    assert running.course.deaths == 0, "it did not die"
    await fleet.close()
    await asyncio.sleep(0)


async def test_an_engine_that_is_refused_bounds_no_request_and_one_that_is_down_does() -> None:
    fleet = _fleet(VirtualClock())
    fleet.switching.observe(JobActivated(job=JOB))
    good = EngineDescription(vocabulary=256, context_tokens=128, model="policy")
    serving = _joined(fleet, Client(good), ENGINE, EngineKind.DEDICATED)
    assert await fleet.switching.settled(_version(0), timeout_s=5)
    other = EngineDescription(vocabulary=10, context_tokens=4096, model="another")
    client = Client(other)
    refused = _joined(fleet, client, EngineId("e1"), EngineKind.DEDICATED)
    await asyncio.gather(*fleet._tasks)
    assert "vocabulary 10, not 256" in refused.fault

    registry = fleet.registry

    def bounds() -> tuple[int | None, int, set[str]]:
        return registry.vocabulary_tokens(), registry.context_tokens(), registry.models()

    assert bounds() == (256, 128, {"policy"})
    assert fleet._context_limit == 128
    for each in (refused, serving):
        fleet.down(each, "it is away")
        assert bounds() == (256, 128, {"policy"})
    client.described = good
    fleet.up(refused)
    await asyncio.gather(*fleet._tasks)
    assert not refused.clashes
    await fleet.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize(("features", "lines"), [((), 0), ((FIRST_CORE_FEATURE,), 1)])
async def test_the_log_names_an_engine_whose_further_ranks_are_not_seen(
    caplog: pytest.LogCaptureFixture, features: tuple[str, ...], lines: int
) -> None:
    fleet = _fleet(VirtualClock())
    fleet.switching.observe(JobActivated(job=JOB))
    _joined(fleet, Client(EngineDescription(features=features)), ENGINE, EngineKind.DEDICATED)
    await asyncio.gather(*fleet._tasks)
    assert caplog.text.count(f"engine {ENGINE}: its weights are checked on its first") == lines
    await fleet.close()


async def test_an_update_that_ends_in_an_unforeseen_error_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    fleet = _fleet(clock)
    fleet.switching.observe(JobActivated(job=JOB))
    member = _joined(fleet, Client(fault=RuntimeError("a bug")), ENGINE, EngineKind.DEDICATED)
    assert not await fleet.switching.settled(_version(0), timeout_s=0.05)
    assert member.fault == "RuntimeError: a bug"
    assert "a bug" in caplog.text
    clock.advance_to(60.0)
    fleet.switching.observe(TimePassed())
    assert await fleet.switching.settled(_version(0), timeout_s=5)
    await fleet.close()
    await asyncio.sleep(0)


async def test_an_engine_whose_fault_was_logged_has_a_line_once_it_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock = VirtualClock()
    fleet = _fleet(clock)
    fleet.switching.observe(JobActivated(job=JOB))
    _joined(fleet, Client(fault=EngineLost("no identity")), ENGINE, EngineKind.DEDICATED)
    assert not await fleet.switching.settled(_version(0), timeout_s=0.05)
    clock.advance_to(60.0)
    fleet.switching.observe(TimePassed())
    assert await fleet.switching.settled(_version(0), timeout_s=5)
    fleet.switching.observe(VersionPublished(job=JOB, store="s", version=WeightVersion(1)))
    assert await fleet.switching.settled(_version(1), timeout_s=5)
    assert [line for line in caplog.messages if "served" in line and ENGINE in line] == [
        f"engine {ENGINE} is not served: no identity",
        f"engine {ENGINE} is served now",
    ]
    await fleet.close()
    await asyncio.sleep(0)


async def test_a_timeout_beside_a_late_event_loop_is_no_engine_s_silence() -> None:
    clock, blame = VirtualClock(), RequestBlame()
    fleet = _fleet(clock, blame)
    fleet.switching.observe(JobActivated(job=JOB))
    member = _joined(fleet, Client(), ENGINE, EngineKind.DEDICATED)
    assert await fleet.switching.settled(_version(0), timeout_s=5)
    probing = EngineProbing(fleet, blame, clock)
    silent = EngineUnreachable("TimeoutError", Change.NONE)
    clock.advance_to(10.0)
    probing.was_late()
    clock.advance_to(14.0)
    assert await probing.attempt_broke(member, silent, began_s=12.0) is Change.NONE
    assert member.up
    clock.advance_to(16.0)
    assert await probing.attempt_broke(member, silent, began_s=14.0) is Change.UNKNOWN
    assert not member.up
    await fleet.close()
    await asyncio.sleep(0)
