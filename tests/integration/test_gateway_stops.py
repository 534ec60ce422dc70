"""A cluster's stop through the real gateway and a real agent, to turns on a guest."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from harvester.agent.http import application
from harvester.agent.node import NodeAgent
from harvester.config import AgentConfig
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.ids import SlotId
from harvester.contracts.page import Guest, PageDirectory, Pulse
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import Site, gateway_on

SLOT = SlotId("slot0")
STOP = {"by": "alice", "reason": "incident 42"}
CAPACITY = {"duration_s": 60.0, "margin_s": 0.5, "spill_ratio": 0.1, "instance": "i"}
SHORT_S = 3.0


class Node:
    """A real agent whose guest is a fake engine: its page says what the engine runs."""

    def __init__(self, root: Path, engine: FakeEngine, url: str, *, lease_s: float) -> None:
        self.engine = engine
        self.away = False
        config = AgentConfig.model_validate(
            {
                "mode": "harvest",
                "page_root": root / "pages",
                "state_dir": root / "state",
                "lease_ttl_s": lease_s,
                "slots": [
                    {
                        "name": SLOT,
                        "engine_url": url,
                        "concurrency": 4,
                        "policy": {"proof": {"share_ratio": 0.0}},
                    }
                ],
            }
        )
        pages = PageDirectory.create(root / "pages" / SLOT)
        pages.pulse_writer("prod", 0).write(
            Pulse(model_samples=1000), now_ns=monotonic_ns(), ttl_ns=10**12
        )
        self._guest = pages.guest_page()
        self._guest.make()
        self.agent = NodeAgent(config, clock=MonotonicClock(), version="1")

    @property
    def leased(self) -> bool:
        return self.agent.leases.live(SLOT) is not None

    @web.middleware
    async def out_of_reach(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.away and request.transport is not None:
            request.transport.abort()
            return web.Response()
        reply: web.StreamResponse = await handler(request)
        return reply

    async def run(self) -> None:
        while True:
            guest = Guest(running=self.engine.open)
            self._guest.write(guest, now_ns=monotonic_ns(), ttl_ns=10**10)
            self.agent.beat()
            # As a guest's middleware reads it.
            self.engine.epoch = str(self.agent.leases.view(SLOT).epoch)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def cluster(
    root: Path, *, lease_s: float = 60.0
) -> AsyncIterator[tuple[Any, Node, FakeEngine]]:
    dedicated = FakeEngine(step_s=0.01, epoch=None)
    guest, guest_site, agent_site = FakeEngine(step_s=0.02, epoch="1"), Site(), Site()
    await guest_site.serve(guest.app())
    node = Node(root, guest, guest_site.url, lease_s=lease_s)
    app = application(node.agent)
    app.middlewares.append(node.out_of_reach)
    await agent_site.serve(app)
    beats = asyncio.create_task(node.run())
    agents = [{"id": "agent", "url": agent_site.url}]
    try:
        capacity = {**CAPACITY, "duration_s": lease_s}
        async with gateway_on(
            dedicated, agents=agents, capacity=capacity, capacity_period_s=0.1
        ) as gateway:
            yield gateway, node, guest
    finally:
        beats.cancel()
        node.agent.close()
        await agent_site.close()
        await guest_site.close()


async def busy(gateway: Any, guest: FakeEngine, tokens: int) -> list[asyncio.Task[Any]]:
    turns = [asyncio.create_task(gateway.generate(f"t{n}", tokens)) for n in range(12)]
    await gateway.until(lambda: guest.open == 4)
    return turns


async def test_a_hold_lets_turns_end_on_the_guest_and_sends_no_new_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (gateway, node, guest):
        turns = await busy(gateway, guest, 60)
        status, reply = await gateway.post("/v1/stops", {"order": "hold", **STOP})
        assert (status, reply["agents"]) == (200, {"agent": ""})
        assert reply["left"] == [reply["in_force"]]
        assert reply["tenants"] == [given.tenant for given in gateway.scheduler.jobs.values()]
        await gateway.until(lambda: gateway.scheduler.fleet.members["guest.slot0"].held)
        begun = len(guest.models)
        more = [asyncio.create_task(gateway.generate(f"m{n}", 5)) for n in range(6)]
        done = await asyncio.gather(*turns, *more)
        assert {status for status, _ in done} == {200}
        assert len(guest.models) == begun, "no new turn"
        counters = (await gateway.status())["jobs"]["job"]["turns"]
        assert counters["migrated"] == 0, "running turns end where they are"
        await gateway.until(lambda: not node.leased)
        said = await gateway.status()
        assert [(s["order"], s["by"], s["reason"]) for s in said["stops"]] == [
            ("hold", "alice", "incident 42")
        ]


async def test_a_drain_moves_turns_at_once_and_loses_none(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (gateway, node, guest):
        turns = await busy(gateway, guest, 200)
        _, typo = await gateway.post("/v1/stops", {"order": "drain", "tenant": "typo", **STOP})
        _, whole = await gateway.post("/v1/stops", {"order": "drain", **STOP})
        jobs = [*(await gateway.status())["jobs"]]
        assert (typo["reached"], whole["reached"]) == ([], jobs)
        assert not node.leased, "the agent has ended it before the reply"
        await gateway.until(lambda: not guest.open)
        for status, choice in await asyncio.gather(*turns):
            assert status == 200
            assert len(choice["token_ids"]) == 200
        status, reply = await gateway.post("/v1/stops", {"order": "none"})
        assert (status, reply["in_force"]) == (200, None)
        again = [asyncio.create_task(gateway.generate(f"a{n}", 20)) for n in range(12)]
        await gateway.until(lambda: node.leased)
        await asyncio.gather(*again)


async def metrics(gateway: Any) -> str:
    async with gateway._session.get(f"{gateway.url}/metrics") as reply:
        return await reply.text()


async def test_an_agent_out_of_reach_is_named_and_obeys_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="scheduler")
    async with cluster(tmp_path) as (gateway, node, _):
        node.away = True
        _, reply = await gateway.post("/v1/stops", {"order": "drain", "tenant": "default", **STOP})
        assert "does not answer" in reply["agents"]["agent"]
        assert (await gateway.status())["stop_faults"]
        shown = await metrics(gateway)
        assert 'scheduler_stop_missing{agent="agent"} 1.0' in shown
        assert 'scheduler_agent_up{agent="agent"} 0.0' in shown
        (silent,) = [line for line in caplog.messages if line.startswith("agent agent: its slots")]
        assert "does not answer" in silent
        node.away = False
        await gateway.until(lambda: node.agent.stops.stops)
        await gateway.until(lambda: "agent agent answers again" in caplog.messages)
        shown = await metrics(gateway)
        assert 'scheduler_stop_missing{agent="agent"} 0.0' in shown
        assert 'scheduler_agent_up{agent="agent"} 1.0' in shown
        (stop,) = node.agent.stops.stops
        assert (stop.source, stop.tenant, stop.order) == ("cluster", "default", "drain")


async def test_with_the_gateway_gone_the_agent_frees_the_slot_within_the_lease(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, lease_s=SHORT_S) as (gateway, node, guest):
        turns = await busy(gateway, guest, 2000)
        # Nothing of the gateway runs any more, and nothing is given back.
        for task in gateway.scheduler._tasks:
            task.cancel()
        lease = node.agent.leases.live(SLOT)
        assert lease is not None
        assert lease.ends_s <= node.agent.clock.now() + SHORT_S
        await gateway.until(lambda: not node.leased)
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


async def test_only_the_operator_stops_the_cluster(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"default: {'a' * 16}\noperator: {'o' * 16}\nobserver: {'b' * 16}\n")
    tokens.chmod(0o600)
    async with gateway_on(FakeEngine(step_s=0.01, epoch=None), tokens=tokens) as gateway:
        for token, expected in (("a" * 16, 403), ("b" * 16, 403), ("x" * 16, 401), ("o" * 16, 200)):
            headers = {"Authorization": f"Bearer {token}"}
            status, _ = await gateway.post("/v1/stops", {"order": "hold", **STOP}, headers)
            assert status == expected


async def test_a_malformed_order_stops_nothing() -> None:
    async with gateway_on(FakeEngine(step_s=0.01, epoch=None)) as gateway:
        for body in ({"order": "halt"}, {"order": "hold"}, {"order": "hold", "slot": "s", **STOP}):
            status, _ = await gateway.post("/v1/stops", body)
            assert status == 400
        assert (await gateway.status())["stops"] == []


async def test_an_agent_from_before_stops_is_named_and_its_lease_given_back(
    fake_agent: Any,
) -> None:
    dedicated, guest = FakeEngine(step_s=0.01, epoch=None), FakeEngine(step_s=0.02, epoch="1")
    site = Site()
    await site.serve(guest.app())
    fake_agent.engine_url = site.url
    agents = [{"id": "agent", "url": fake_agent.url}]
    async with gateway_on(
        dedicated, agents=agents, capacity=CAPACITY, capacity_period_s=0.1
    ) as gateway:
        turns = await busy(gateway, guest, 60)
        _, reply = await gateway.post("/v1/stops", {"order": "hold", **STOP})
        assert "HTTP 404" in reply["agents"]["agent"]
        await gateway.until(lambda: fake_agent.lease is None)
        assert {status for status, _ in await asyncio.gather(*turns)} == {200}
        assert (await gateway.status())["jobs"]["job"]["turns"]["migrated"] == 0
        begun = len(guest.models)
        more = [asyncio.create_task(gateway.generate(f"m{n}", 5)) for n in range(12)]
        await asyncio.gather(*more)
        assert len(guest.models) == begun
    await site.close()
