"""A gateway whose state file or journal cannot be written goes on, and moves nothing unrecorded."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harvester.contracts.journal import JournalWriter
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import GatewayInProcess, gateway_on
from tests.unit.harvester.contracts.test_journal import SmallDisk

HARVESTING, DEDICATED = "/v1/jobs/job/harvesting", "/v1/jobs/job/dedicated"
JOBS = {"jobs": [{"id": "job", "active": True}, {"id": "other"}]}


def _engine() -> FakeEngine:
    return FakeEngine(step_s=0.01, epoch=None)


def _state_is_full(gateway: GatewayInProcess, full: bool) -> None:
    """Every write fails, as on a full disk."""
    gateway.scheduler.state._db.execute(f"PRAGMA query_only={full:d}")


async def _metric(gateway: GatewayInProcess, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{gateway.url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


async def _loops_live(gateway: GatewayInProcess, for_s: float = 0.6) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(for_s):
            await gateway.scheduler.failed()


async def test_turns_of_a_job_that_began_anew_stay_refused_after_a_full_disk_and_a_restart(
    tmp_path: Path,
) -> None:
    """Its trainer would get samples of the other run's weights under its own numbers."""
    engine, state = _engine(), tmp_path / "state.sqlite"
    async with gateway_on(engine, state=state) as gateway:
        assert (await gateway.publish(1, state_hash="a" * 32))[0] == 200
        _state_is_full(gateway, True)
        assert (await gateway.publish(1, state_hash="b" * 32))[0] == 409
        assert (await gateway.status())["unrecorded"] == ["refusals"]
        _state_is_full(gateway, False)
        await gateway.until(lambda: not gateway.scheduler.unrecorded())
    async with gateway_on(engine, state=state) as gateway:
        assert (await gateway.generate("t", 2))[0] == 409


async def test_a_version_that_cannot_be_recorded_is_refused_before_any_engine_moves() -> None:
    engine = _engine()
    async with gateway_on(engine, **JOBS) as gateway:
        assert (await gateway.publish(1))[0] == 200
        _state_is_full(gateway, True)
        status, reply = await gateway.publish(2)
        assert (status, reply["error"][:19]) == (503, "nothing was changed")
        other = {"version": 1, "store": "other.store"}
        assert (await gateway.post("/v1/jobs/other/versions", other))[0] == 503
        said = await gateway.status()
        assert (said["target_version"], said["settled"]) == (1, True)
        assert {name: each["version"] for name, each in said["jobs"].items()} == {
            "job": 1,
            "other": 0,
        }
        turn = {"token_ids": [4, 5], "sampling_params": {"max_tokens": 3}}
        _, reply = await gateway.post("/jobs/job/inference/v1/generate", turn)
        assert [span["version"] for span in reply["choices"][0]["spans"]] == [1]
        assert (await gateway.publish(1))[0] == 503
        # Refused for its number, whatever the disk holds.
        assert (await gateway.post("/v1/jobs/job/versions", {"version": 1, "store": "b"}))[0] == 409
        _state_is_full(gateway, False)
        assert (await gateway.publish(2))[0] == 200
        assert gateway.scheduler.state.jobs()["job"].published.version == 2


async def test_an_activation_that_cannot_be_recorded_is_refused_before_any_engine_moves() -> None:
    async with gateway_on(_engine(), **JOBS) as gateway:
        await gateway.publish(1)
        await gateway.post("/v1/jobs/other/versions", {"version": 1, "store": "other.store"})
        _state_is_full(gateway, True)
        assert (await gateway.post("/v1/jobs/other/activate", {}))[0] == 503
        said = await gateway.status()
        assert (said["active_job"], said["settled"]) == ("job", True)
        _state_is_full(gateway, False)
        assert (await gateway.post("/v1/jobs/other/activate", {}))[0] == 200


@pytest.mark.parametrize(
    ("path", "name", "shown"),
    [
        (HARVESTING, "harvesting", "may_lease"),
        (DEDICATED, "dedicated", "may_use_dedicated"),
    ],
)
async def test_a_switch_goes_off_on_a_full_disk_and_not_on(
    path: str, name: str, shown: str
) -> None:
    async with gateway_on(_engine()) as gateway:

        async def is_on() -> Any:
            return (await gateway.status())["jobs"]["job"][shown]

        assert (await gateway.post(path, {"enabled": True}))[0] == 200
        _state_is_full(gateway, True)
        off = {"job": "job", name: False, "recorded": False}
        assert await gateway.post(path, {"enabled": False}) == (200, off)
        assert not await is_on()
        for body in ({"enabled": True}, {"enabled": True, "for_s": 0.1}):
            status, reply = await gateway.post(path, body)
            assert (status, reply["error"][:19]) == (503, "nothing was changed")
        await _loops_live(gateway)
        assert not await is_on()
        assert (await gateway.status())["unrecorded"] == ["switches"]
        assert await _metric(gateway, "scheduler_unrecorded") == 1.0
        _state_is_full(gateway, False)
        await gateway.until(lambda: not gateway.scheduler.unrecorded())
        state = gateway.scheduler.state
        if name == "dedicated":
            assert state.parked() == ["job"]
        else:
            assert state.jobs()["job"].harvesting is False
        assert await gateway.post(path, {"enabled": True}) == (200, {"job": "job", name: True})


async def test_a_switch_that_was_not_renewed_goes_off_on_a_full_disk() -> None:
    async with gateway_on(_engine()) as gateway:
        assert (await gateway.post(HARVESTING, {"enabled": True, "for_s": 0.3}))[0] == 200
        _state_is_full(gateway, True)
        await _loops_live(gateway, for_s=1.0)
        assert not (await gateway.status())["jobs"]["job"]["may_lease"]


async def test_a_full_journal_holds_up_no_switch_and_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JournalWriter, "_open", lambda self: SmallDisk(self._path, "ab"))
    monkeypatch.setattr(SmallDisk, "room_bytes", 0)
    engines = [_engine() for _ in range(2)]
    async with gateway_on(*engines, journal_dir=tmp_path) as gateway:
        assert (await gateway.publish(1))[0] == 200
        turns = [asyncio.create_task(gateway.generate(f"r{n}", 60)) for n in range(4)]
        await gateway.until_tokens(5, turns=4)
        await gateway.sites[0].close()
        assert [status for status, _ in await asyncio.gather(*turns)] == [200] * 4
        await _loops_live(gateway)
        assert (await gateway.status())["unrecorded"] == ["decisions"]
        missing = await _metric(gateway, "scheduler_journal_missing_lines_total")
        assert missing == gateway.scheduler.missing_decisions() > 0
        SmallDisk.room_bytes = 1 << 20
        await gateway.until(lambda: not gateway.scheduler.unrecorded())


@pytest.mark.parametrize("version", [0, -1, 1 << 63, 1 << 64, 1 << 70])
async def test_a_version_beyond_63_bits_is_refused_by_its_field(version: int) -> None:
    async with gateway_on(_engine()) as gateway:
        await gateway.publish(1)
        update = {"update_info": {"store": "job.store", "version": version}}
        for status, reply in (
            await gateway.publish(version),
            await gateway.post("/update_weights", update),
            await gateway.post("/v1/jobs/job/vllm/update_weights", update),
        ):
            assert status == 400
            assert "version`" in reply["error"]
        if version:
            status, reply = await gateway.generate("r", 1, weight_version={"minimum": version})
            assert status == 400
            assert "minimum" in str(reply)
        assert (await gateway.publish(2))[0] == 200


async def test_the_last_version_is_served_and_recorded() -> None:
    last = (1 << 63) - 1
    async with gateway_on(_engine()) as gateway:
        assert (await gateway.publish(last))[0] == 200
        assert gateway.scheduler.state.jobs()["job"].published.version == last
        _, choice = await gateway.generate("r", 1)
        assert choice["spans"][0]["version"] == last
