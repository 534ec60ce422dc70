"""Leases: the client with lost messages, and guests that come and go under the real gateway."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import Epoch, JobId, LeaseId, SlotId, TenantId
from harvester.contracts.wire.leases import LeaseEnded, LeaseGranted, LeaseRequest
from scheduler.gateway.capacity.agent_client import AgentClient
from tests.integration.conftest import FakeAgent, served_agent

REQUEST = LeaseRequest(
    request_id="q1", slot=SlotId("slot"), tenant=TenantId("t"), job=JobId("job"), duration_s=5.0
)
LOST = pytest.mark.parametrize("lost", ["lose_requests", "lose_replies"])


async def _generate(service, name: str, max_tokens: int):
    body = {
        "request_id": name,
        "token_ids": [1],
        "sampling_params": {"max_tokens": max_tokens, "temperature": 1.0},
    }
    return await service.post("/inference/v1/generate", body)


@LOST
async def test_a_lost_message_costs_a_repetition_and_never_a_second_lease(fake_agent, lost) -> None:
    async with aiohttp.ClientSession() as session:
        client = AgentClient(session, fake_agent.url, timeout_s=30.0)
        setattr(fake_agent, lost, 1)
        taken = await client.take(REQUEST)
        assert isinstance(taken, LeaseGranted)
        assert (taken.lease, fake_agent.epoch) == ("lease1", 1)
        setattr(fake_agent, lost, 1)
        renewed = await client.renew(taken.lease, epoch=taken.epoch, duration_s=5.0)
        assert renewed == taken
        setattr(fake_agent, lost, 1)
        assert isinstance(await client.release(taken.lease), LeaseEnded)
        assert fake_agent.lease is None


@LOST
async def test_an_agent_that_stays_silent_is_exhausted_and_the_same_request_may_follow(
    fake_agent, lost
) -> None:
    async with aiohttp.ClientSession() as session:
        client = AgentClient(session, fake_agent.url, timeout_s=30.0)
        setattr(fake_agent, lost, 2)
        with pytest.raises(Exhausted, match="does not answer"):
            await client.take(REQUEST)
        taken = await client.take(REQUEST)
        assert isinstance(taken, LeaseGranted)
        assert fake_agent.epoch == 1
        ended = await client.renew(LeaseId("other"), epoch=Epoch(1), duration_s=1.0)
        assert isinstance(ended, LeaseEnded)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - set over HTTP
            await asyncio.sleep(0.05)


def _agents(agent) -> dict:
    return {
        "agents": [{"id": "agent", "url": agent.url}],
        "capacity_period_s": 0.1,
        # A busy machine renews late.
        "capacity": {"duration_s": 60.0, "margin_s": 0.5, "spill_ratio": 0.5},
    }


async def test_a_busy_job_leases_a_slot_its_guest_serves_and_switching_off_gives_it_back(
    fake_engine, gateway, fake_agent
) -> None:
    dedicated, guest = fake_engine(holds_at=75), fake_engine(holds_at=75, epoch=1)
    fake_agent.engine_url = guest.url
    service = gateway(dedicated, **_agents(fake_agent))
    await service.post("/v1/jobs/job/versions", {"version": 1, "store": "s"})
    turns = [asyncio.create_task(_generate(service, f"r{n}", 150)) for n in range(14)]
    await guest.until("/_fake", lambda looked: looked["open"] == 4)
    assert (await guest.get("/_fake"))["version"] == 1
    status, _ = await service.post("/v1/jobs/job/harvesting", {"enabled": False})
    assert status == 200
    await dedicated.post("/_fake", {"holds_at": 0})
    await guest.until("/_fake", lambda looked: looked["open"] == 0)
    for status, reply in await asyncio.gather(*turns):
        assert status == 200
        assert len(reply["choices"][0]["token_ids"]) == 150
    assert fake_agent.lease is None
    said = await service.get("/v1/status")
    assert said["jobs"]["job"]["turns"]["migrated"] >= 4
    assert said["jobs"]["job"]["turns"]["lost"] == 0
    assert said["leases"] == []


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        ({"stock": True}, "no RoseMux guest at this URL: check engine_url"),
        ({}, "an engine that is no guest at this URL"),
        ({"epoch": "1", "slot": "another"}, "the guest of slot 'another' at this URL"),
        ({"epoch": "1", "slot": "slot"}, ""),
    ],
    ids=["production", "a dedicated engine", "another slot's guest", "its guest"],
)
async def test_an_offered_engine_proves_that_it_is_the_slots_guest_before_anything_is_sent(
    fake_engine, gateway, fake_agent, engine, fault
) -> None:
    dedicated, other = fake_engine(holds_at=75), fake_engine(holds_at=75)
    await other.post("/_fake", engine)
    fake_agent.engine_url = other.url
    service = gateway(dedicated, **_agents(fake_agent))
    turns = [asyncio.create_task(_generate(service, f"r{n}", 150)) for n in range(14)]
    if not fault:
        await other.until("/_fake", lambda looked: looked["open"] == 4)
    else:
        await service.until(
            "/v1/status", lambda s: any(fault in each["fault"] for each in s["engines"].values())
        )
        (slot,) = (await service.get("/v1/status"))["slots"].values()
        assert fault in slot["reason"]
    # Version 0 has no weight call: the next one has.
    await service.post("/v1/jobs/job/versions", {"version": 1, "store": "s"})
    for each in (dedicated, other):
        await each.post("/_fake", {"holds_at": 0})
    replies = await asyncio.gather(*turns)
    assert [status for status, _ in replies] == [200] * len(turns)
    looked = await other.get("/_fake")
    assert (looked["most_open"] == 0, looked["calls"] == []) == (bool(fault), bool(fault))
    assert (looked["staged"] == []) == bool(fault)


async def test_slots_of_the_same_name_on_two_nodes_are_leased_apart(
    fake_engine, gateway, fake_agent, another_agent, tmp_path
) -> None:
    agents = {"a": fake_agent, "b": another_agent}
    guests = [fake_engine(holds_at=75, epoch=1) for _ in agents]
    for agent, guest in zip(agents.values(), guests, strict=True):
        agent.engine_url = guest.url
    settings = _agents(fake_agent) | {
        "agents": [{"id": name, "url": agent.url} for name, agent in agents.items()],
        "state_file": str(tmp_path / "state.sqlite"),
    }
    dedicated = fake_engine(holds_at=75)
    service = gateway(dedicated, **settings)
    turns = [asyncio.create_task(_generate(service, f"r{n}", 150)) for n in range(16)]
    for guest in guests:
        await guest.until("/_fake", lambda looked: looked["open"] == 4)
    said = await service.get("/v1/status")
    assert said["slots"].keys() == {"a.slot", "b.slot"}
    assert {(each["slot"], each["agent"]) for each in said["leases"]} == {
        ("a.slot", "a"),
        ("b.slot", "b"),
    }
    assert said["silent_agents"] == {}
    for engine in (dedicated, *guests):
        await engine.post("/_fake", {"holds_at": 0})
    for status, reply in await asyncio.gather(*turns):
        assert status == 200
        assert len(reply["choices"][0]["token_ids"]) == 150
    # A restart takes both over, each from its agent.
    service.kill(signal.SIGKILL)
    again = await gateway(**settings).until("/v1/status", lambda looked: len(looked["leases"]) == 2)
    assert {each["agent"] for each in again["leases"]} == {"a", "b"}
    assert (fake_agent.epoch, another_agent.epoch) == (1, 1)


@pytest.mark.parametrize(
    ("silent", "doubted", "ttl_s", "settings"),
    [
        (1, False, None, {}),
        (3, False, None, {}),
        (1, True, None, {}),
        (
            1,
            False,
            5.0,
            {
                "capacity_period_s": 1.0,
                "capacity": {"spill_ratio": 0.5},
                "timeouts": {"agent_s": 6.0},
            },
        ),
    ],
    ids=["one", "three", "one and a doubt", "short leases"],
)
async def test_an_agent_that_falls_silent_costs_no_other_agents_lease(
    fake_engine, gateway, silent, doubted, ttl_s, settings
) -> None:
    async with AsyncExitStack() as stack:
        agents, guests = [], []
        for number in range(1 + silent):
            agent = await stack.enter_async_context(served_agent(FakeAgent(lease=f"{number}-")))
            guests.append(fake_engine(step_s=0.02, epoch=1))
            agent.engine_url, agent.duration_s = guests[-1].url, ttl_s
            agents.append(agent)
        listed = [{"id": f"a{n}", "url": each.url} for n, each in enumerate(agents)]
        short = _agents(agents[0])
        short["capacity"]["duration_s"] = 6.0
        given = {**short, "timeouts": {"agent_s": 2.0}, **settings, "agents": listed}
        service = gateway(fake_engine(step_s=0.02), **given)
        count = 8 + 4 * len(agents)
        turns = [asyncio.create_task(_generate(service, f"r{n}", 5000)) for n in range(count)]
        for guest in guests:
            await guest.until("/_fake", lambda looked: looked["open"] == 4)
        for agent, guest in zip(agents[1:], guests[1:], strict=True):
            agent.silent = True
            if doubted:
                await guest.post("/_fake", {"epoch": "9"})
        said = await service.until(
            "/v1/status", lambda s: (len(s["leases"]), len(s["silent_agents"])) == (1, silent)
        )
        assert said["silent_agents"].keys() == {each["id"] for each in listed[1:]}
        assert [each["agent"] for each in said["leases"]] == ["a0"]
        renewals = agents[0].calls.count("renew 0-1")
        await _until(lambda: agents[0].calls.count("renew 0-1") > renewals)
        looked = await guests[0].get("/_fake")
        assert (looked["open"], looked["aborted"]) == (4, 0)
        assert sum(call.startswith("take") for call in agents[0].calls) == 1
        await asyncio.to_thread(service.kill, signal.SIGTERM)
        await asyncio.gather(*turns)


async def test_a_guest_that_dies_or_refuses_the_epoch_costs_no_turn(
    fake_engine, gateway, fake_agent
) -> None:
    dedicated, guest = fake_engine(holds_at=75), fake_engine(holds_at=75, epoch=1)
    fake_agent.engine_url = guest.url
    service = gateway(dedicated, **_agents(fake_agent))
    turns = [asyncio.create_task(_generate(service, f"r{n}", 100)) for n in range(14)]
    await guest.until("/_fake", lambda looked: looked["open"] == 4)
    await guest.post("/_fake", {"epoch": "9"})
    more = [asyncio.create_task(_generate(service, f"s{n}", 30)) for n in range(8)]
    await asyncio.sleep(0.3)
    guest.kill(signal.SIGKILL)
    await dedicated.post("/_fake", {"holds_at": 0})
    for status, reply in await asyncio.gather(*turns, *more):
        assert status == 200
        assert reply["choices"][0]["finish_reason"] == "length"


async def test_a_grant_that_reaches_the_guest_after_the_lease_reached_us_costs_no_lease(
    fake_engine, gateway, fake_agent
) -> None:
    dedicated, guest = fake_engine(holds_at=75), fake_engine(holds_at=75, epoch=0)
    fake_agent.engine_url = guest.url
    service = gateway(dedicated, **_agents(fake_agent))
    turns = [asyncio.create_task(_generate(service, f"r{n}", 200)) for n in range(14)]
    await service.until(
        "/v1/status", lambda s: any("refused" in e["fault"] for e in s["engines"].values())
    )
    await guest.post("/_fake", {"epoch": "1"})
    await guest.until("/_fake", lambda looked: looked["open"] > 0)
    for engine in (dedicated, guest):
        await engine.post("/_fake", {"holds_at": 0})
    for status, reply in await asyncio.gather(*turns):
        assert status == 200
        assert len(reply["choices"][0]["token_ids"]) == 200
    assert fake_agent.epoch == 1


async def test_leases_are_renewed_while_used_and_given_back_at_the_end(
    fake_engine, gateway, fake_agent
) -> None:
    dedicated, guest = fake_engine(step_s=0.02), fake_engine(step_s=0.02, epoch=1)
    fake_agent.engine_url = guest.url
    agents = _agents(fake_agent)
    agents["capacity"]["duration_s"] = 8.0
    service = gateway(dedicated, **agents)
    turns = [asyncio.create_task(_generate(service, f"r{n}", 5000)) for n in range(12)]
    await guest.until("/_fake", lambda looked: looked["open"] == 4)
    await _until(lambda: any(call.startswith("renew") for call in fake_agent.calls))
    assert (await guest.get("/_fake"))["open"] == 4
    await asyncio.to_thread(service.kill, signal.SIGTERM)
    await asyncio.gather(*turns)
    assert fake_agent.calls[-1] == "release lease1"


async def test_a_restarted_gateway_adopts_the_leases_it_held(
    fake_engine, gateway, fake_agent, tmp_path
) -> None:
    dedicated, guest = fake_engine(step_s=0.02), fake_engine(step_s=0.02, epoch=1)
    fake_agent.engine_url = guest.url
    settings = {**_agents(fake_agent), "state_file": str(tmp_path / "state.db")}
    first = gateway(dedicated, **settings)
    turns = [asyncio.create_task(_generate(first, f"r{n}", 5000)) for n in range(12)]
    await guest.until("/_fake", lambda looked: looked["open"] == 4)
    first.kill(signal.SIGKILL)
    await asyncio.gather(*turns, return_exceptions=True)
    second = gateway(dedicated, **settings)
    status = await second.until("/v1/status", lambda s: s["leases"])
    assert status["leases"][0]["lease"] == "slot.1"
    assert fake_agent.epoch == 1


async def test_a_job_that_may_not_use_its_own_engine_goes_on_on_its_lease(
    fake_engine, gateway, fake_agent
) -> None:
    dedicated, guest = fake_engine(holds_at=75), fake_engine(holds_at=75, epoch=1)
    fake_agent.engine_url = guest.url
    agents = _agents(fake_agent)
    # Below its dedicated places a job leases nothing.
    agents["capacity"]["spill_ratio"] = 1.0
    service = gateway(dedicated, **agents)
    await service.post("/v1/jobs/job/versions", {"version": 1, "store": "s"})
    turns = [asyncio.create_task(_generate(service, f"r{n}", 150)) for n in range(3)]
    await dedicated.until("/_fake", lambda looked: looked["open"] == 3)
    assert fake_agent.lease is None
    await service.until_sampled(3 * 74)
    status, told = await service.post("/v1/jobs/job/dedicated", {"enabled": False})
    assert (status, told) == (200, {"job": "job", "dedicated": False})
    await guest.until("/_fake", lambda looked: looked["open"] == 3)
    await dedicated.until("/_fake", lambda looked: looked["open"] == 0)
    for engine in (dedicated, guest):
        await engine.post("/_fake", {"holds_at": 0})
    for status, reply in await asyncio.gather(*turns):
        assert status == 200
        (choice,) = reply["choices"]
        assert len(choice["token_ids"]) == 150
        assert [span["version"] for span in choice["spans"]] == [1, 1]
    # It follows versions while no turn uses it, and takes turns again when it may.
    await service.post("/v1/jobs/job/versions", {"version": 2, "store": "s"})
    await dedicated.until("/_fake", lambda looked: looked["version"] == 2)
    await service.post("/v1/jobs/job/harvesting", {"enabled": False})
    await service.until("/v1/status", lambda said: not said["leases"])
    later = asyncio.create_task(_generate(service, "later", 20))
    await service.until("/v1/status", lambda said: said["queued_turns"] == 1)
    await service.post("/v1/jobs/job/dedicated", {"enabled": True})
    status, reply = await later
    assert status == 200
    assert len(reply["choices"][0]["token_ids"]) == 20


async def test_a_restarted_gateway_knows_which_job_may_not_use_its_own_engine(
    fake_engine, gateway, fake_agent, tmp_path
) -> None:
    dedicated, guest = fake_engine(step_s=0.01), fake_engine(step_s=0.01, epoch=1)
    fake_agent.engine_url = guest.url
    settings = _agents(fake_agent) | {"state_file": str(tmp_path / "state.sqlite")}
    service = gateway(dedicated, **settings)
    await service.post("/v1/jobs/job/versions", {"version": 1, "store": "s"})
    await service.post("/v1/jobs/job/dedicated", {"enabled": False})
    service.kill()
    service = gateway(dedicated, **settings)
    assert (await service.get("/v1/status"))["jobs"]["job"]["may_use_dedicated"] is False
    status, _ = await _generate(service, "r", 20)
    assert status == 200
    assert (await dedicated.get("/_fake"))["open"] == 0


async def test_a_reload_adds_agents_and_a_mistake_changes_nothing(
    gateway, fake_agent, another_agent, tmp_path: Path
) -> None:
    fake_agent.offered = another_agent.offered = False
    agents = [{"id": "a", "url": fake_agent.url}, {"id": "b", "url": another_agent.url}]
    service = gateway(agents=agents)
    file = tmp_path / "gateway0.json"
    written = json.loads(file.read_text())

    def reload(**changes) -> None:
        file.write_text(json.dumps(written | changes))
        os.kill(service.process.pid, signal.SIGHUP)

    async with AsyncExitStack() as stack:
        third = await stack.enter_async_context(served_agent(FakeAgent(lease="third")))
        more = [*agents, {"id": "c", "url": third.url}]
        reload(agents=more, prot=1)
        await asyncio.sleep(0.5)
        assert await service.get("/readyz") == {"status": "ok"}
        queued = asyncio.create_task(_generate(service, "r", 1))
        reload(agents=more, max_attempts=3)
        await service.until("/v1/status", lambda found: found["leases"])
        assert third.calls
        queued.cancel()
