"""One service on two nodes: real agents behind HTTP, the scheduler's real holder of leases.

Production and guests only write their pages. Leases and budgets run on one clock of the test.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from harvester.agent.http import application
from harvester.agent.node import NodeAgent
from harvester.config import AgentConfig
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId
from harvester.contracts.page import Guest, PageDirectory, Pulse
from harvester.contracts.wire.leases import SlotOffers
from harvester.platform.tls import NO_CREDENTIALS
from scheduler.decision_log import DecisionLog
from scheduler.gateway.capacity.agent_client import AgentClient
from scheduler.gateway.capacity.agent_offers import AgentOffers
from scheduler.gateway.capacity.cluster_stops import ClusterStops
from scheduler.gateway.capacity.harvested_slots import HarvestedSlots
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.policy.budget_ledger import SharedBudget
from scheduler.gateway.policy.capacity import CapacityConfig, CapacityPolicy, Demand
from tests.unit.scheduler.gateway.registry import registry_of

SAMPLES = 32
"""Most of one pulse."""
POLICY = {
    "ttft_slo_s": 1.0,
    "cooldown_s": 0.0,
    "proof": {"share_ratio": 0},
    # Half of the requests may miss: no burn rate is ever above 2.
    "budget": {"slo_target_ratio": 0.5, "share_ratio": 1.0, "hold_s": 5.0},
}


@dataclass
class Clock:
    at_s: float = 1000.0

    def now(self) -> float:
        return self.at_s


class Node:
    """An agent on its own disk, with a production engine and a guest that write their pages."""

    def __init__(self, root: Path, name: str, clock: Clock) -> None:
        self.clock = clock
        pages = PageDirectory.create(root / "pages" / f"slot-{name}")
        self._pulse, self._guest = pages.pulse_writer("prod", 0), pages.guest_writer()
        self._samples = self._steps = 0
        self._write(0.01, 0)
        config = {
            "node": name,
            "mode": "harvest",
            "unsafe_experiments": True,
            "page_root": root / "pages",
            "state_dir": root / "state",
            "slots": [{"name": f"slot-{name}", "service": "chat", "policy": POLICY}],
        }
        self.agent = NodeAgent(AgentConfig.model_validate(config), clock=clock, version="1")
        self.slot = self.agent.slots[0]
        self.agent.beat()

    def serve(self, requests: int, *, ttft_s: float = 0.01) -> None:
        """Production's requests, each beside a step of the guest."""
        while requests > 0:
            self._write(ttft_s, min(requests, SAMPLES))
            self.clock.at_s += 0.001
            self.agent.beat()
            requests -= SAMPLES

    def harm(self, requests: int) -> None:
        """Late ones, as long as the guest is leased."""
        while requests > 0 and self.leased:
            self.serve(SAMPLES, ttft_s=5.0)
            requests -= SAMPLES

    @property
    def spent(self) -> float:
        return self.slot.policy.guards.budget.spent

    @property
    def limit(self) -> float | None:
        return self.slot.policy.guards.budget.limit

    @property
    def leased(self) -> bool:
        return self.agent.leases.live(self.slot.name) is not None

    def _write(self, ttft_s: float, samples: int) -> None:
        self._samples, self._steps = self._samples + samples, self._steps + 1
        pulse = Pulse(
            model_samples=1000, ttft_s_recent=(ttft_s,) * SAMPLES, samples_total=self._samples
        )
        self._pulse.write(pulse, now_ns=monotonic_ns(), ttl_ns=10**11)
        guest = Guest(steps_launched=self._steps, steps_finished=self._steps)
        self._guest.write(guest, now_ns=monotonic_ns(), ttl_ns=10**11)


class Line:
    """An AgentClient over a network that can be cut."""

    def __init__(self, client: AgentClient) -> None:
        self._client = client
        self.cut = False

    def __getattr__(self, call: str) -> Callable[..., Any]:
        if self.cut:
            return self._silent
        found: Callable[..., Any] = getattr(self._client, call)
        return found

    async def _silent(self, *_: object, **__: object) -> SlotOffers:
        raise Exhausted("cut off")


class Guests:
    """The gateway's engines, of which this test needs none."""

    registry = registry_of(JobId("j"), tenant="t")

    def add(self, *_: object, **__: object) -> None: ...

    def remove(self, *_: object) -> None: ...

    def renewed(self, *_: object, **__: object) -> None: ...

    def hold(self, *_: object, **__: object) -> bool:
        return True

    def review_contexts(self) -> None: ...


class Fleet:
    def __init__(self, root: Path, session: aiohttp.ClientSession) -> None:
        self.root, self._session = root, session
        self.clock = Clock()
        self.nodes: dict[str, Node] = {}
        self.lines: dict[str, Any] = {}
        self._servers: dict[str, TestServer] = {}
        self.start_scheduler()

    async def start(self, name: str, disk: str) -> Node:
        node = self.nodes[name] = Node(self.root / disk, name, self.clock)
        server = self._servers[name] = TestServer(application(node.agent))
        await server.start_server()
        client = AgentClient(self._session, str(server.make_url("")), timeout_s=30.0)
        self.lines[name] = Line(client)
        self.start_scheduler()
        return node

    def start_scheduler(self) -> None:
        """Another process's holder of leases on the same state file."""
        policy = CapacityPolicy(CapacityConfig(instance=f"i{self.clock.at_s}"))
        self.state = SchedulerState(self.root / "scheduler.sqlite")
        demand = Demand(
            job=JobId("j"), active=True, harvesting=True, queued=9, running=0, dedicated_places=0
        )
        self.harvest = HarvestedSlots(
            policy,
            Guests(),  # type: ignore[arg-type]
            AgentOffers(dict(self.lines), dict.fromkeys(self.lines, NO_CREDENTIALS), {}),
            ClusterStops(self.state, self.lines),
            SimpleNamespace(observe=lambda: (demand,)),  # type: ignore[arg-type]
            self.state,
            DecisionLog(None, policy, {}, max_bytes=1 << 20, now=0.0),
            self.clock,
            wake=asyncio.Event(),
            client_of=lambda _url, *, credentials: None,  # type: ignore[arg-type, return-value]
        )

    async def seconds(self, count: int) -> None:
        for _ in range(count):
            self.clock.at_s += 1.0
            for node in self.nodes.values():
                node.agent.beat()
            await self.harvest.decide()

    async def kill(self, name: str) -> None:
        """Without a word: neither lease nor state is given back."""
        del self.nodes[name]
        await self._servers.pop(name).close()

    @property
    def chat(self) -> SharedBudget:
        (found,) = self.harvest.budgets.all()
        return found

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with aiohttp.ClientSession() as session:
        fleet = Fleet(tmp_path, session)
        yield fleet
        await fleet.close()


async def two_nodes(fleet: Fleet) -> tuple[Node, Node]:
    """Both leased, with 640 requests each: a budget of 640 misses."""
    a, b = await fleet.start("a", "disk-a"), await fleet.start("b", "disk-b")
    await fleet.seconds(3)
    for node in (a, b):
        node.serve(640)
    await fleet.seconds(8)
    assert (a.leased, b.leased) == (True, True)
    assert fleet.chat.budget == pytest.approx(640)
    return a, b


async def test_a_budget_is_allotted_by_traffic_and_bounds_each_node(fleet: Fleet) -> None:
    a, b = await two_nodes(fleet)
    assert a.limit == pytest.approx(320, rel=0.01)
    assert (a.limit or 0) + (b.limit or 0) <= 640
    limit = a.limit or 0
    a.harm(640)
    assert not a.leased
    assert limit < a.spent <= limit + SAMPLES
    await fleet.seconds(2)
    assert b.leased
    assert fleet.chat.spent == pytest.approx(a.spent)
    assert fleet.chat.spent + fleet.chat.outstanding <= fleet.chat.budget


async def test_a_node_killed_with_its_disk_and_one_cut_off_never_free_what_they_might_have_spent(
    fleet: Fleet,
) -> None:
    a, b = await two_nodes(fleet)
    lost, kept = a.limit or 0, b.limit or 0
    await fleet.kill("a")
    fleet.lines["b"].cut = True
    await fleet.seconds(12)
    assert not b.leased
    assert b.limit is None
    assert fleet.chat.outstanding == pytest.approx(lost + kept)

    a = await fleet.start("a", "new-disk")
    await fleet.seconds(8)
    a.serve(64)
    await fleet.seconds(8)
    assert a.leased
    # Only what its own 64 requests have earned is free.
    assert (a.limit or 0) <= 32 + 1e-6

    fleet.lines["b"].cut = False
    await fleet.seconds(20)
    assert b.leased
    assert (a.limit or 0) + (b.limit or 0) + lost <= fleet.chat.budget + 1e-6
    assert fleet.chat.outstanding == pytest.approx(lost + (a.limit or 0) + (b.limit or 0))


async def test_a_restarted_scheduler_knows_what_is_spent_and_outstanding(fleet: Fleet) -> None:
    a, _ = await two_nodes(fleet)
    a.harm(96)
    await fleet.seconds(2)
    before = fleet.chat
    with contextlib.closing(fleet.state):
        fleet.start_scheduler()
    after = fleet.chat
    assert (after.budget, after.spent) == (before.budget, before.spent)
    assert after.outstanding == before.outstanding > 0
    assert after.spent >= 96


async def test_a_service_that_has_overspent_is_leased_nowhere(fleet: Fleet) -> None:
    """A guest that steps without a grant: the misses beside it are its service's all the same."""
    a, b = await two_nodes(fleet)
    a.serve(3000, ttft_s=5.0)
    await fleet.seconds(10)
    assert fleet.chat.exhausted
    assert b.spent == 0
    assert (a.leased, b.leased) == (False, False)
