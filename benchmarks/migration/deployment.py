"""The parts of a run as processes: rollout engines behind taps, a slot with its agent, the gateway.

Two dedicated engines, and a guest whose leases a real agent grants. Production is only the page
that it would write: idle, so that the guest may run. Engines follow a store that this run
publishes. The faults that strike these parts are in faults.py.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.migration.engine_tap import EngineTap
from benchmarks.migration.guest_agent import GuestAgent
from benchmarks.migration.model import ENGINE_ARGUMENTS, PARSER_ARGUMENTS
from benchmarks.migration.pin_judge import Announcement
from benchmarks.migration.rollout_routes import JOB
from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.processes import Child, Processes
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import EngineCommand, EngineSpec
from harvester.contracts.clock import Clock, MonotonicClock, monotonic_ns
from harvester.contracts.page import PageDirectory, ProductionModel, Pulse
from weightsync.publisher import Publisher

STORE, SLOT, GUEST = "store", "slot0", "guest"
CONTEXTS = {"e0": 512, "e1": 256, GUEST: 512}
NUMERICS = {"e0": "wide", "e1": "narrow", GUEST: "wide"}
"""Labels that the gateway is given: engines that turns with `equal_numerics` may move between. All
compute alike, so that other turns lose nothing."""
GUEST_KV_TOKENS = 1536
_START_S = 1800.0
_BEAT_S = 0.05
_PULSE_TTL_NS = 300_000_000


@dataclass(slots=True)
class EngineProcess:
    """One engine behind its tap; a killed one comes back in the same place."""

    name: str
    command: EngineCommand
    url: str
    tap: EngineTap
    processes: Processes
    starts: int = 0
    child: Child | None = None
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def changing(self) -> bool:
        """Whether it is being started or killed."""
        return self._changing.locked()

    async def start(self) -> None:
        """Raises ConfigError if the process ends, TimeoutError if it does not answer."""
        async with self._changing:
            if self.child is not None:
                return
            self.starts += 1
            name = f"{self.name}-{self.starts}"
            self.child = self.processes.start(
                name, self.command.arguments, environment=self.command.environment
            )
            async with asyncio.timeout(_START_S):
                while not await _answers(f"{self.url}/health"):
                    self.child.check()
                    await asyncio.sleep(0.25)
            await self.tap.listen()

    async def kill(self) -> None:
        """SIGKILL of all its processes; its connections break and none is accepted."""
        async with self._changing:
            child, self.child = self.child, None
            # First: a dead engine's port refuses connections, where the tap would break them.
            await self.tap.close()
            if child is not None:
                await asyncio.to_thread(self.processes.kill, child)

    @property
    def ended(self) -> bool:
        """Whether its process has ended though no one here killed it."""
        return self.child is not None and self.child.process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Signals all of its processes at once."""
        if self.child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.child.process.pid, number)


class IdleProduction:
    """The pulse of a production engine without requests."""

    def __init__(self, pages: PageDirectory) -> None:
        self.kv_usage_ratio = 0.0
        self._pulse = pages.pulse_writer("production", 0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        model = ProductionModel(
            prefill_base_s=0.01,
            prefill_s_per_token=1e-5,
            decode_base_s=0.01,
            decode_s_per_request=1e-4,
        )
        step = 0
        while not self._stopped.wait(_BEAT_S):
            step += 1
            pulse = Pulse(
                model=model,
                model_samples=1000,
                kv_usage_ratio=self.kv_usage_ratio,
                steps_total=step,
                busy_s_total=step * 0.01,
                ttft_s_recent=(0.03,) * 32,
                itl_s_recent=(0.008,) * 32,
            )
            self._pulse.write(pulse, now_ns=monotonic_ns(), ttl_ns=_PULSE_TTL_NS)


@dataclass(slots=True, kw_only=True)
class Deployment:
    root: Path
    session: aiohttp.ClientSession
    processes: Processes
    engines: dict[str, EngineProcess]
    agent: GuestAgent
    gateway_url: str
    kill_switch: Path
    production: IdleProduction
    clock: Clock
    states: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Weights of each published version."""
    announced: dict[int, Announcement] = field(default_factory=dict)

    @property
    def record(self) -> Path:
        return self.root / "requests.jsonl"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts.jsonl"

    @property
    def held(self) -> Path:
        return self.root / "held.jsonl"

    async def publish(self, publisher: Publisher, state: Mapping[str, Any]) -> int:
        """Returns the version, once every dedicated engine serves it."""
        version = max(self.states, default=0) + 1
        await asyncio.to_thread(publisher.publish, dict(state))
        self.states[version] = state
        announcement = self.announced[version] = Announcement(self.clock.now())
        await self.post(f"/v1/jobs/{JOB}/versions", {"version": version, "store": STORE})
        self.announced[version] = replace(announcement, answered_s=self.clock.now())
        return version

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        async with self.session.post(self.gateway_url + path, json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{path}: {reply.status} {await reply.text()}")
            return await reply.json()

    async def status(self) -> Any:
        async with self.session.get(f"{self.gateway_url}/v1/status") as reply:
            return await reply.json()

    def state_hashes(self) -> dict[int, str]:
        return {version: self._hash(version) for version in self.states}

    def _hash(self, version: int) -> str:
        index = self.root / STORE / f"weight_v{version:06d}" / "model.safetensors.index.json"
        return str(json.loads(index.read_text())["rosemux"]["state_hash"])


@asynccontextmanager
async def deployed(root: Path, model: Path) -> AsyncIterator[Deployment]:
    """Everything up, nothing published yet."""
    clock = MonotonicClock()
    pages = PageDirectory.create(root / "pages" / SLOT)
    (root / "tmp").mkdir()
    ports = dict(zip((*CONTEXTS, "agent"), free_ports(len(CONTEXTS) + 1), strict=True))
    taps = dict(zip(CONTEXTS, free_ports(len(CONTEXTS)), strict=True))
    async with AsyncExitStack() as stack:
        processes = stack.enter_context(Processes(root / "logs"))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        )
        production = IdleProduction(pages)
        stack.callback(production.stop)
        engines = {}
        for name, context_tokens in CONTEXTS.items():
            url = f"http://127.0.0.1:{ports[name]}"
            tap = EngineTap(
                name,
                session,
                port=taps[name],
                engine_url=url,
                attempts=root / "attempts.jsonl",
                held=root / "held.jsonl",
                clock=clock,
            )
            command = _command(name, model, ports[name], context_tokens, root, pages)
            engines[name] = EngineProcess(name, command, url, tap, processes)
            stack.push_async_callback(tap.close)
        agent = GuestAgent(
            processes=processes,
            root=root,
            port=ports["agent"],
            slot=SLOT,
            guest_url=engines[GUEST].tap.url,
            kv_tokens=GUEST_KV_TOKENS,
        )
        agent.start()
        await asyncio.gather(*(engine.start() for engine in engines.values()))
        gateway_url = await _start_gateway(processes, root, engines, agent.url)
        yield Deployment(
            root=root,
            session=session,
            processes=processes,
            engines=engines,
            agent=agent,
            gateway_url=gateway_url,
            kill_switch=root / "pages" / "kill",
            production=production,
            clock=clock,
        )


def _command(
    name: str, model: Path, port: int, context_tokens: int, root: Path, pages: PageDirectory
) -> EngineCommand:
    spec = EngineSpec(
        name=name,
        model=model,
        port=port,
        max_model_len=context_tokens,
        max_num_seqs=8,
        vllm=capabilities(installed_vllm_version()),
        extra_arguments=(*ENGINE_ARGUMENTS, *PARSER_ARGUMENTS),
    )
    if name == GUEST:
        command = launch.guest(spec, pages=pages.path, weights=root)
    else:
        command = launch.dedicated(spec, weights=root)
    environment = {**command.environment, "TMPDIR": str(root / "tmp")}
    return EngineCommand(command.arguments, environment)


async def _start_gateway(
    processes: Processes, root: Path, engines: Mapping[str, EngineProcess], agent_url: str
) -> str:
    """Its URL. Raises ConfigError if the process ends."""
    port = free_ports(1)[0]
    config = {
        "port": port,
        "engines": [
            {
                "id": name,
                "url": engine.tap.url,
                "concurrency": 8,
                "numerics": NUMERICS[name],
            }
            for name, engine in engines.items()
            if name != GUEST
        ]
        + [{"id": GUEST, "kind": "guest", "slot": SLOT, "numerics": NUMERICS[GUEST]}],
        "agents": [{"id": "agent", "url": agent_url}],
        "jobs": [{"id": JOB}],
        "capacity_period_s": 0.2,
        "capacity": {"spill_ratio": 0.25},
        # The start of an engine takes more than the default's minute where two share a core.
        "timeouts": {"queue_s": 600, "publish_s": 600},
    }
    file = root / "gateway.yaml"
    file.write_text(json.dumps(config))
    command = (sys.executable, "-m", "harvester.cli", "gateway", "--config", str(file))
    child = processes.start("gateway", command)
    url = f"http://127.0.0.1:{port}"
    while not await _answers(f"{url}/healthz"):
        child.check()
        await asyncio.sleep(0.1)
    return url


async def _answers(url: str) -> bool:
    try:
        timeout = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
