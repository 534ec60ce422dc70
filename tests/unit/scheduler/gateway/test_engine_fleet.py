"""The fleet's engines between the placement of a turn and its first attempt."""

import asyncio
from typing import Any

from harvester.contracts.clock import VirtualClock
from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.engines import EngineDescription
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams
from scheduler.decision_log import DecisionLog
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.policy.routing import RoutingPolicy
from scheduler.gateway.policy.routing_events import RoutingConfig
from scheduler.gateway.policy.trajectories import TurnLedger
from scheduler.gateway.policy.versions import VersionPolicy
from scheduler.gateway.policy.versions_events import (
    JobActivated,
    VersionPublished,
    VersionsConfig,
)
from scheduler.gateway.running_attempt import RunningAttempt
from scheduler.model import Engine, EngineKind

JOB, ENGINE = JobId("job"), EngineId("e0")


class Client:
    """An engine that takes every version at once."""

    def close(self) -> None:
        pass

    async def describe(self) -> EngineDescription:
        return EngineDescription()

    async def switch(self, **_: Any) -> EngineDescription:
        return EngineDescription()

    def forget(self) -> None:
        pass


def _running() -> RunningAttempt:
    request = GenerateRequest(
        request_id="t", token_ids=(1,), sampling_params=SamplingParams(max_tokens=1)
    )
    turn = TurnLedger(JOB).open(request, trajectory=TrajectoryId("t"))
    assert turn is not None
    return RunningAttempt(turn, began_s=0.0, heard_s=0.0)


async def test_a_turn_begins_only_where_the_version_that_it_was_placed_at_is_still_served() -> None:
    clock = VirtualClock()
    versions = VersionPolicy(VersionsConfig(min_dedicated=1))
    log = DecisionLog(None, versions, {}, max_bytes=1 << 16, now=0.0)
    dispatcher = Dispatcher(RoutingPolicy(RoutingConfig()), clock, queue_s=60)
    fleet = EngineFleet(versions, dispatcher, log, clock, update_s=1)
    engine = Engine(engine=ENGINE, kind=EngineKind.DEDICATED, url="", concurrency=4, numerics="n")
    client: Any = Client()
    member = fleet.add(engine, client)
    fleet.observe(JobActivated(job=JOB))
    fleet.up(member)
    assert await fleet.settled(JOB, WeightVersion(0), timeout_s=5)

    placed_at, first = WeightVersion(0), _running()
    assert fleet.began(ENGINE, first, placed_at) is member
    fleet.ended(member, first)

    fleet.observe(VersionPublished(job=JOB, store="s", version=WeightVersion(1)))
    assert fleet.began(ENGINE, _running(), placed_at) is None
    assert await fleet.settled(JOB, WeightVersion(1), timeout_s=5)
    assert fleet.began(ENGINE, _running(), placed_at) is None
    assert not member.running
    assert fleet.began(ENGINE, _running(), WeightVersion(1)) is member
    await fleet.close()
    await asyncio.sleep(0)
