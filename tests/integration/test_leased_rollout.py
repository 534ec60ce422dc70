"""A job that harvests in a process of its own: real control, real gateway, fake engines."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import JobId
from scheduler.rollmux.control.job_gateway import GatewayAccess
from tests.integration.test_phase_processes import Job, Machine

PLACES = 4
"""Places of the guest."""


@dataclass
class Scene:
    machine: Machine
    service: Any
    own: Any
    guest: Any
    agent: Any

    def job(self, name: str, *arguments: str) -> Job:
        module = "tests.integration.phase_job"
        socket = str(self.machine.socket)
        return Job(self.machine.children.start("-m", module, socket, name, *arguments))

    def turns(self, count: int, tokens: int) -> list["asyncio.Task[tuple[int, Any]]"]:
        def body(n: int) -> dict[str, Any]:
            sampling = {"max_tokens": tokens, "temperature": 1.0}
            return {"request_id": f"r{n}", "token_ids": [1], "sampling_params": sampling}

        route = "/inference/v1/generate"
        return [asyncio.create_task(self.service.post(route, body(n))) for n in range(count)]

    async def allowed(self, *, dedicated: bool, harvesting: bool) -> None:
        wanted = (dedicated, harvesting)
        await self.service.until(
            "/v1/status",
            lambda said: (
                tuple(said["jobs"]["job"][w] for w in ("may_use_dedicated", "may_lease")) == wanted
            ),
        )

    async def lease_is_given_back(self) -> None:
        async with asyncio.timeout(30):
            while self.agent.lease is not None:  # noqa: ASYNC110 - set over HTTP
                await asyncio.sleep(0.02)
        assert self.agent.calls[-1] == "release lease1"


@pytest.fixture
async def scene(
    tmp_path: Path, fake_engine: Any, gateway: Any, fake_agent: Any
) -> AsyncIterator[Scene]:
    own, guest = fake_engine(holds_at=200), fake_engine(holds_at=200, epoch=1)
    fake_agent.engine_url = guest.url
    service = gateway(
        own,
        agents=[{"id": "agent", "url": fake_agent.url}],
        jobs=[{"id": "job", "harvesting": False}],
        capacity_period_s=0.1,
        capacity={"duration_s": 60.0, "margin_s": 0.5, "spill_ratio": 0.5},
    )
    await service.post("/v1/jobs/job/versions", {"version": 1, "store": "s"})
    machine = Machine(tmp_path)
    await asyncio.to_thread(machine.control)
    yield Scene(machine, service, own, guest, fake_agent)
    machine.children.stop()


async def _with_a_tail_on_the_guest(scene: Scene) -> tuple[Job, Job]:
    """Job with its tail on the guest, and the other job, which holds its node now."""
    job, other = scene.job("job", scene.service.url), scene.job("other")
    assert await asyncio.to_thread(job.hears) == "placed"
    assert await asyncio.to_thread(other.hears) == "placed"
    job.enter("rollout")
    assert await asyncio.to_thread(job.hears) == "granted 1"
    await scene.allowed(dedicated=True, harvesting=True)
    await scene.guest.until("/_fake", lambda looked: looked["open"] == PLACES)
    assert (await scene.own.get("/_fake"))["open"] > 0
    job.says("0.9")
    other.enter("rollout")
    assert await asyncio.to_thread(other.hears) == "granted 2"
    assert (await scene.own.get("/_fake"))["open"] == 0
    await scene.allowed(dedicated=False, harvesting=True)
    return job, other


async def test_turns_go_to_the_guest_with_the_tail_come_back_with_it_and_lose_nothing(
    scene: Scene,
) -> None:
    turns = scene.turns(12, 400)
    job, other = await _with_a_tail_on_the_guest(scene)
    await scene.guest.until("/_fake", lambda looked: looked["open"] == PLACES)
    other.end()
    await scene.own.until("/_fake", lambda looked: looked["open"] > 0)
    for engine in (scene.own, scene.guest):
        await engine.post("/_fake", {"holds_at": 0})
    for status, reply in await asyncio.gather(*turns):
        assert status == 200
        assert len(reply["choices"][0]["token_ids"]) == 400
    job.end()
    assert await asyncio.to_thread(job.hears) == "ended"
    await scene.allowed(dedicated=False, harvesting=False)
    await scene.lease_is_given_back()
    counted = (await scene.service.get("/v1/status"))["jobs"]["job"]
    assert sum(counted["tokens"].values()) == 12 * 400
    assert counted["tokens"]["guest"] > 0


async def test_a_job_killed_at_its_tail_leaves_neither_engines_nor_leases_in_use(
    scene: Scene,
) -> None:
    turns = scene.turns(12, 10_000)
    job, _other = await _with_a_tail_on_the_guest(scene)
    # Tokens of running turns.
    await scene.service.until("/v1/status", lambda said: said["jobs"]["job"]["tokens"]["guest"] > 0)
    job.process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        await scene.allowed(dedicated=False, harvesting=False)
        await scene.guest.until("/_fake", lambda looked: looked["open"] == 0)
    assert (await scene.own.get("/_fake"))["open"] == 0
    await scene.lease_is_given_back()
    # The process that comes again finds its engines with its permit.
    again = scene.job("job", scene.service.url)
    assert await asyncio.to_thread(again.hears) == "placed"
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)


async def test_a_job_killed_on_its_own_node_leaves_its_engines_unused(scene: Scene) -> None:
    turns = scene.turns(3, 10_000)
    job = scene.job("job", scene.service.url)
    assert await asyncio.to_thread(job.hears) == "placed"
    job.enter("rollout")
    await scene.own.until("/_fake", lambda looked: looked["open"] == 3)
    job.process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        await scene.own.until("/_fake", lambda looked: looked["open"] == 0)
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)


async def test_a_gateway_that_asks_for_a_token_gets_it_and_refuses_a_job_at_its_start(
    fake_engine: Any, gateway: Any, tmp_path: Path
) -> None:
    tokens, ours, wrong = tmp_path / "tokens.yaml", tmp_path / "ours", tmp_path / "wrong"
    tokens.write_text("team: a-token-of-enough-characters\n")
    for file in (tokens, ours, wrong):
        file.touch(mode=0o600)
        file.chmod(0o600)
    ours.write_text("a-token-of-enough-characters\n")
    wrong.write_text("another-of-enough-characters\n")
    jobs = [{"id": "job", "tenant": "team"}, {"id": "foreign", "tenant": "others"}]
    url = gateway(fake_engine(), token_file=str(tokens), jobs=jobs).url

    def switch_off(job: str, token_file: Path | None) -> None:
        GatewayAccess(url=url, token_file=token_file).of(JobId(job)).switch_off()

    await asyncio.to_thread(switch_off, "job", ours)
    view = await asyncio.to_thread(GatewayAccess(url=url, token_file=ours).of(JobId("job")).view)
    assert not view.guest_serves(JobId("job"))
    for job, token_file in (("job", wrong), ("job", None), ("foreign", ours), ("none", ours)):
        with pytest.raises(ConfigError, match="gateway"):
            await asyncio.to_thread(switch_off, job, token_file)
