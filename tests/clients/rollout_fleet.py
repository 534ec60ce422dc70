"""One gateway over two real engines in float32: a dedicated one of few places, and a leased guest.

The node agent is acted: it leases the guest to whoever asks, and grants every step. A client that
sends more turns than the dedicated engine has places is thus served by a harvested engine too.
"""

import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from benchmarks.migration.model import publish_model, write_model
from benchmarks.testbed.parts import Parts, RunPaths
from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.processes import Processes
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import EngineSpec
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.page import GrantMode, PageDirectory
from harvester.contracts.wire.leases import LeaseGranted
from tests.integration import engine_slot
from tests.integration.conftest import FakeAgent
from tests.integration.forked_program import begin_forked, preload_engines

JOB = "policy"
CONTEXT_TOKENS = 1024
PLACES = 2
"""Places of the dedicated engine: so few that a batch leases the guest."""
SEED = 7


class GuestAgent(FakeAgent):
    """Grants each lease of the guest, and every step under it."""

    def __init__(self, pages: PageDirectory) -> None:
        super().__init__()
        self.grants = engine_slot.FakeAgent(pages)

    def _take(self, body: bytes) -> msgspec.Struct:
        reply = super()._take(body)
        if isinstance(reply, LeaseGranted):
            self.grants.epoch = reply.epoch
            self.grants.say(GrantMode.UNGATED)
        return reply


@dataclass(frozen=True, slots=True)
class RolloutFleet:
    url: str
    model: Path
    store: Path
    logs: Path
    session: aiohttp.ClientSession

    async def status(self) -> dict[str, Any]:
        async with self.session.get(f"{self.url}/v1/status") as response:
            status: dict[str, Any] = await response.json()
            return status

    async def publish(self, version: int) -> None:
        body = {"version": version, "store": self.store.name}
        route = f"{self.url}/v1/jobs/{JOB}/versions"
        async with self.session.post(route, json=body) as response:
            assert response.status == 200, await response.text()


@asynccontextmanager
async def rollout_fleet(root: Path) -> AsyncIterator[RolloutFleet]:
    """Both engines serve version 1 of the store `JOB`. Logs stay in `root`/logs."""
    model, weights, logs = root / "model", root / "weights", root / "logs"
    texts = [path.read_text() for path in sorted(Path("docs").rglob("*.md"))]
    write_model(model, texts=texts, context_tokens=CONTEXT_TOKENS, seed=SEED)
    publish_model(model, weights / JOB)
    # In shared memory and with a short name: sockets of vLLM lie there as well.
    pages_root = Path(tempfile.mkdtemp(prefix="rmx-", dir="/dev/shm"))
    pages = PageDirectory.create(pages_root / "slot")
    ports = dict(zip(("dedicated", "guest", "gateway"), free_ports(3), strict=True))
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    agent = GuestAgent(pages)
    agent.engine_url = urls["guest"]
    runner = web.AppRunner(agent.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    agent.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    def spec(name: str) -> EngineSpec:
        return EngineSpec(
            name=name,
            model=model,
            port=ports[name],
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=8,
            vllm=capabilities(installed_vllm_version()),
            # The model's own name, as a client that loads it gives it.
            extra_arguments=("--dtype", "float32", "--served-model-name", str(model)),
        )

    paths = RunPaths(run=root, pages=pages_root, logs=logs, cache=root / "cache")
    try:
        preload_engines()
        with Processes(logs, begin=begin_forked) as processes:
            parts = Parts(processes=processes, paths=paths, clock=MonotonicClock())
            parts.engine("dedicated", launch.dedicated(spec("dedicated"), weights=weights))
            parts.engine("guest", launch.guest(spec("guest"), pages=pages.path, weights=weights))
            config = root / "gateway.json"
            config.write_text(json.dumps(_settings(ports["gateway"], urls["dedicated"], agent.url)))
            for name in ("dedicated", "guest"):
                await parts.answers(name, urls[name], lambda _line: None)
            parts.service("gateway", "gateway", "--config", str(config), core=None)
            await parts.answers("gateway", urls["gateway"], lambda _line: None, path="/healthz")
            timeout = aiohttp.ClientTimeout(total=150.0)
            async with aiohttp.ClientSession(timeout=timeout) as session:
                fleet = RolloutFleet(urls["gateway"], model, weights / JOB, logs, session)
                await fleet.publish(1)
                yield fleet
    finally:
        agent.grants.stop()
        await runner.cleanup()
        shutil.rmtree(pages_root, ignore_errors=True)


def _settings(port: int, dedicated_url: str, agent_url: str) -> dict[str, Any]:
    return {
        "port": port,
        "engines": [{"id": "dedicated", "url": dedicated_url, "concurrency": PLACES}],
        "agents": [{"id": "agent", "url": agent_url}],
        "jobs": [{"id": JOB, "active": True}],
        "capacity_period_s": 0.1,
        # The lease of one client's run is still there for the next one's.
        "capacity": {"idle_release_s": 300.0},
    }
