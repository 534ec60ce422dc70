"""Processes and servers for tests of the gateway: fake engines, the real gateway, a fake agent."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from harvester.contracts.ids import Epoch, LeaseId, NodeId, SlotId
from harvester.contracts.wire.engines import EngineDescription
from harvester.contracts.wire.leases import (
    EndReason,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRequest,
    SlotOffer,
    SlotOffers,
    SlotState,
)
from tests.integration.forked_program import ForkedProgram

HERE = Path(__file__).parent
PATIENT = {
    "connect_s": 30.0,
    "stall_s": 60.0,
    "guest_stall_s": 60.0,
    "guest_tail_stall_s": 60.0,
    "queue_s": 60.0,
    "agent_s": 30.0,
}
"""Timeouts of a gateway for tests of something else: a busy machine is silent for seconds, and
engines, agents and places are then as well as before."""
_GATEWAY = (
    "import sys; from pathlib import Path; from scheduler.gateway.serve_command import gateway; "
    "gateway(Path(sys.argv[1]))"
)


class Served:
    """A Python program whose first line ends with its address."""

    def __init__(self, *arguments: str) -> None:
        self.process = ForkedProgram(*arguments)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]

    def kill(self, number: int = signal.SIGKILL) -> int:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
            # A test that fails leaves what it has stopped, and pytest would wait for it at its end.
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)
        status = self.process.wait(timeout=60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status

    async def get(self, path: str) -> Any:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as response:
            return await response.json()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, json=body, headers=named) as response,
        ):
            return response.status, await response.json()

    async def until(self, path: str, holds: Callable[[Any], bool], *, within_s: float = 60) -> Any:
        """Poll a GET route until its answer fits; fails with the last answer."""
        answer = None
        try:
            async with asyncio.timeout(within_s):
                while not holds(answer := await self.get(path)):  # noqa: ASYNC110 - over HTTP
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"{path} never became so: {answer}")
        return answer

    async def until_sampled(self, tokens: int) -> None:
        """Waits until the gateway has this many tokens of the job's turns, open ones included."""
        await self.until(
            "/v1/status", lambda said: sum(said["jobs"]["job"]["tokens"].values()) >= tokens
        )


@pytest.fixture
def fake_engine() -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(
        *,
        step_s: float = 0.002,
        port: int = 0,
        epoch: int | None = None,
        stock: bool = False,
        holds_at: int = 0,
    ) -> Served:
        arguments = [str(HERE / "fake_engine.py"), "--step-s", str(step_s), "--port", str(port)]
        arguments += ["--holds-at", str(holds_at)]
        if epoch is not None:
            arguments += ["--epoch", str(epoch)]
        arguments += ["--stock"] * stock
        started.append(Served(*arguments))
        return started[-1]

    yield start
    for engine in started:
        engine.kill()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts the real gateway process on the given engines."""
    started: list[Served] = []

    def start(*engines: Served, descriptors: int = 0, **settings: Any) -> Served:
        limit = f"import resource as r; r.setrlimit(r.RLIMIT_NOFILE, ({descriptors},) * 2); "
        listed = [
            {"id": f"e{index}", "url": engine.url, "concurrency": 8}
            for index, engine in enumerate(engines)
        ]
        given = {"port": 0, "engines": listed, "jobs": [{"id": "job"}], **settings}
        given["timeouts"] = {**PATIENT, "health_s": 0.1, **given.get("timeouts", {})}
        path = tmp_path / f"gateway{len(started)}.json"
        path.write_text(json.dumps(given))
        program = limit * bool(descriptors) + _GATEWAY
        started.append(Served("-c", program, str(path)))
        return started[-1]

    yield start
    for process in started:
        process.kill(signal.SIGTERM)


class FakeAgent:
    """Lease routes over one slot; loses a request or a reply on demand."""

    def __init__(self, *, lease: str = "lease") -> None:
        """Ids of its leases begin with `lease`."""
        self._lease_prefix = lease
        self.url = ""
        self.engine_url = "http://127.0.0.1:9"
        self.engine = EngineDescription()
        self.offered = True
        self.silent = False
        """As a node without power: connections hang."""
        self.epoch = 0
        self.lease: LeaseGranted | None = None
        self.by_request: dict[str, LeaseGranted] = {}
        self.lose_requests = 0
        self.lose_replies = 0
        self.calls: list[str] = []
        self.duration_s: float | None = None

    def app(self) -> web.Application:
        @web.middleware
        async def hang(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.silent:
                await asyncio.Event().wait()
            return await handler(request)

        app = web.Application(middlewares=[hang])
        app.add_routes(
            [
                web.get("/v1/slots", self.slots),
                web.post("/v1/leases", self.take),
                web.post("/v1/leases/{lease}/renew", self.renew),
                web.delete("/v1/leases/{lease}", self.release),
            ]
        )
        return app

    async def _answer(
        self, request: web.Request, decide: Callable[[bytes], msgspec.Struct]
    ) -> web.Response:
        body = await request.read()
        assert request.transport is not None
        if self.lose_requests:
            self.lose_requests -= 1
            request.transport.abort()
            return web.Response()
        reply = decide(body)
        if self.lose_replies:
            self.lose_replies -= 1
            request.transport.abort()
            return web.Response()
        return web.Response(body=msgspec.json.encode(reply), content_type="application/json")

    async def slots(self, request: web.Request) -> web.Response:
        state = SlotState.LEASED if self.lease else SlotState.OFFERED
        offer = SlotOffer(
            slot=SlotId("slot"),
            node=NodeId("node"),
            state=state if self.offered else SlotState.OFF,
            engine_url=self.engine_url,
            model="m",
            engine=self.engine,
            epoch=Epoch(self.epoch),
            concurrency=4,
            kv_tokens=1000,
            idle_ratio=0.5,
        )
        return web.Response(
            body=msgspec.json.encode(SlotOffers(node=NodeId("node"), slots=(offer,)))
        )

    async def take(self, request: web.Request) -> web.Response:
        return await self._answer(request, self._take)

    def _take(self, body: bytes) -> msgspec.Struct:
        asked = msgspec.json.decode(body, type=LeaseRequest)
        self.calls.append(f"take {asked.request_id}")
        if asked.request_id in self.by_request:
            return self.by_request[asked.request_id]
        assert asked.slot == "slot"
        if self.lease is not None or not self.offered:
            return LeaseRefused(slot=asked.slot, reason="leased", retry_after_s=0.1)
        self.epoch += 1
        self.lease = LeaseGranted(
            lease=LeaseId(f"{self._lease_prefix}{self.epoch}"),
            slot=asked.slot,
            epoch=Epoch(self.epoch),
            duration_s=self.duration_s or asked.duration_s,
        )
        self.by_request[asked.request_id] = self.lease
        return self.lease

    async def renew(self, request: web.Request) -> web.Response:
        name = LeaseId(request.match_info["lease"])

        def decide(_body: bytes) -> msgspec.Struct:
            self.calls.append(f"renew {name}")
            if self.lease is None or self.lease.lease != name:
                return LeaseEnded(lease=name, reason=EndReason.UNKNOWN)
            return self.lease

        return await self._answer(request, decide)

    async def release(self, request: web.Request) -> web.Response:
        name = LeaseId(request.match_info["lease"])

        def decide(_body: bytes) -> msgspec.Struct:
            self.calls.append(f"release {name}")
            if self.lease is not None and self.lease.lease == name:
                self.lease = None
            return LeaseEnded(lease=name, reason=EndReason.RELEASED)

        return await self._answer(request, decide)


@pytest.fixture
async def fake_agent() -> AsyncIterator[FakeAgent]:
    async with served_agent(FakeAgent()) as agent:
        yield agent


@pytest.fixture
async def another_agent() -> AsyncIterator[FakeAgent]:
    """On another node that was installed alike: its slot has the same name."""
    async with served_agent(FakeAgent(lease="another")) as agent:
        yield agent


@asynccontextmanager
async def served_agent(agent: FakeAgent) -> AsyncIterator[FakeAgent]:
    runner = web.AppRunner(agent.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    agent.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield agent
    finally:
        await runner.cleanup()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    # Heavy, and only with an extra.
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()
