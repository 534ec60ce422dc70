"""Switches of a job that are on for a time: what a job that dies leaves behind at the gateway."""

import asyncio
import signal
from typing import Any

import pytest

from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import Site, gateway_on
from tests.virtual_clock import VirtualClock

ON_FOR_A_MOMENT = {"enabled": True, "for_s": 0.6}


def _leasing(agent: Any) -> dict[str, Any]:
    return {
        "agents": [{"id": "agent", "url": agent.url}],
        "jobs": [{"id": "job", "harvesting": False}],
        "capacity_period_s": 0.1,
        "capacity": {"duration_s": 60.0, "margin_s": 0.5, "spill_ratio": 0.0},
    }


def _engine(*, epoch: str | None = None) -> FakeEngine:
    return FakeEngine(step_s=0.01, epoch=epoch)


async def test_settings_of_a_dead_job_go_off_by_themselves(fake_agent: Any) -> None:
    dedicated, guest, at_agent = _engine(), _engine(epoch="1"), Site()
    clock = VirtualClock(1000.0)
    await at_agent.serve(guest.app())
    fake_agent.engine_url = at_agent.url
    async with gateway_on(dedicated, clock=clock, **_leasing(fake_agent)) as gateway:
        gateway.sites.append(at_agent)
        await gateway.publish(1)
        for switch in ("dedicated", "harvesting"):
            body = {"enabled": True, "for_s": 4.0}
            status, _ = await gateway.post(f"/v1/jobs/job/{switch}", body)
            assert status == 200
        turns = [asyncio.create_task(gateway.generate(f"r{n}", 5000)) for n in range(12)]
        async with asyncio.timeout(30.0):
            while not guest.open or not dedicated.open:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            clock.now_s += 4.0
            while guest.open or dedicated.open or fake_agent.lease:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        said = (await gateway.status())["jobs"]["job"]
        assert (said["may_use_dedicated"], said["may_lease"]) == (False, False)
        assert not any(turn.done() for turn in turns)
        assert fake_agent.calls[-1] == "release lease1"
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


async def test_a_renewed_setting_stays_on_and_a_setting_without_end_never_goes_off() -> None:
    engine, clock = _engine(), VirtualClock(1000.0)
    async with gateway_on(engine, clock=clock) as gateway:

        async def is_on_after(time_s: float) -> bool:
            clock.now_s += time_s
            # The gateway looks for settings that are over.
            await asyncio.sleep(0.5)
            return bool((await gateway.status())["jobs"]["job"]["may_use_dedicated"])

        for _ in range(3):
            await gateway.post("/v1/jobs/job/dedicated", ON_FOR_A_MOMENT)
            assert await is_on_after(0.5)
        await gateway.post("/v1/jobs/job/dedicated", {"enabled": True})
        assert await is_on_after(10.0)


@pytest.mark.parametrize(
    "body", [{"enabled": False, "for_s": 1}, {"enabled": True, "for_s": 0}, {"enabled": 1}]
)
async def test_a_time_that_is_none_is_refused(body: dict[str, Any]) -> None:
    async with gateway_on(_engine()) as gateway:
        assert (await gateway.post("/v1/jobs/job/dedicated", body))[0] == 400


async def test_turns_of_a_job_without_its_permit_wait_longer_than_for_an_engine() -> None:
    async with gateway_on(_engine(), timeouts={"queue_s": 0.2}) as gateway:
        await gateway.publish(1)
        await gateway.post("/v1/jobs/job/dedicated", {"enabled": False})
        turn = asyncio.create_task(gateway.generate("r", 3))
        await asyncio.sleep(0.8)
        assert not turn.done()
        await gateway.post("/v1/jobs/job/dedicated", {"enabled": True})
        assert (await turn)[0] == 200
        tokens = (await gateway.status())["jobs"]["job"]["tokens"]
        assert tokens == {"dedicated": 3, "guest": 0}


async def test_a_gateway_that_restarts_does_not_take_up_what_was_on_for_a_time(
    fake_engine: Any, gateway: Any, tmp_path: Any
) -> None:
    engine = fake_engine()
    settings = {"state_file": str(tmp_path / "state.db")}
    first = gateway(engine, **settings)
    for switch in ("dedicated", "harvesting"):
        await first.post(f"/v1/jobs/job/{switch}", {"enabled": True, "for_s": 60})
    first.kill(signal.SIGKILL)
    job = (await gateway(engine, **settings).get("/v1/status"))["jobs"]["job"]
    assert (job["may_use_dedicated"], job["may_lease"]) == (False, False)
