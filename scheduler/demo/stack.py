"""The real parts of the demo on one machine: who runs where, with which settings.

    core 0    the production engine; the guest beside it in the isolation backend's class
    core 1    the dedicated rollout engine and the trainers (niced: they stand for other machines),
              agent, gateway and the open-loop client in front of them

Engines start on both cores, because starting is import-bound, and are pinned once they answer.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from coserve import isolation
from coserve.vllm import launch
from coserve.vllm.capabilities import Capabilities, capabilities, installed_vllm_version
from coserve.vllm.launch import STEADY_HEAP, EngineCommand, EngineSpec
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import PageDirectory
from scheduler.demo.job.config import JobConfig
from scheduler.demo.job.model import PolicyShape, write_checkpoint
from scheduler.demo.job.warm_up import WarmUp
from scheduler.demo.prerequisites import free_ports
from scheduler.demo.processes import Child, Processes, pin, renice
from scheduler.demo.production_model import STEP_TOKENS, write_production_checkpoint
from scheduler.demo.records import Arm
from scheduler.demo.slo import SLO_EDGES_ITL_S, SLO_EDGES_TTFT_S, ServiceLevel

SERVING_CORE = 0
ROLLOUT_CORE = 1
ROLLOUT_NICE = 10
TRAINER_NICE = 5
SLOT = "slot-0"
PRODUCTION = "production"
DEDICATED = "dedicated-0"
GUEST = "guest-0"
JOBS = {Arm.FIXED: "fixed", Arm.HARVEST: "harvest"}
ROLLOUT_CONCURRENCY = 16
PRODUCTION_MAX_LEN = 2048
_START_S = 240.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """Where a run keeps its files. `pages` is in shared memory; all but the logs go at the end."""

    run: Path
    pages: Path
    logs: Path
    cache: Path

    @property
    def weights(self) -> Path:
        return self.run / "weights"


@dataclass(frozen=True, slots=True)
class Ports:
    production: int
    guest: int
    dedicated: int
    agent: int
    gateway: int


class Stack:
    """Started by `start_engines`, then `start_services`, then `start_trainers`."""

    def __init__(self, processes: Processes, paths: RunPaths, *, seed: int) -> None:
        self.paths = paths
        self.ports = Ports(*free_ports(5))
        self.pages = PageDirectory.create(paths.pages / SLOT)
        self.isolation = isolation.choose()
        self.vllm = capabilities(installed_vllm_version())
        self.shape = PolicyShape()
        self.engines: dict[str, Child] = {}
        self.services: dict[str, Child] = {}
        self.trainers: dict[Arm, Child] = {}
        self._processes = processes
        self._seed = seed
        self._clock = MonotonicClock()

    def url(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    def rollout_urls(self) -> dict[str, str]:
        return {GUEST: self.url(self.ports.guest), DEDICATED: self.url(self.ports.dedicated)}

    def start_engines(self) -> None:
        """Start the three engines and the policy's warm-up; nothing is waited for."""
        models = self.paths.run / "models"
        write_production_checkpoint(models / PRODUCTION)
        write_checkpoint(models / "policy", self.shape)
        self.paths.weights.mkdir(parents=True, exist_ok=True)
        self._engine(
            PRODUCTION,
            launch.production(
                EngineSpec(
                    name=PRODUCTION,
                    model=models / PRODUCTION,
                    port=self.ports.production,
                    max_model_len=PRODUCTION_MAX_LEN,
                    max_num_seqs=32,
                    vllm=self.vllm,
                    extra_arguments=(
                        *("--load-format", "dummy"),
                        *("--max-num-batched-tokens", str(STEP_TOKENS)),
                        *_histogram_buckets(self.vllm),
                    ),
                ),
                pages=self.pages.path,
            ),
        )
        self._engine(
            GUEST,
            launch.guest(
                self._rollout_engine(GUEST, self.ports.guest, models / "policy"),
                pages=self.pages.path,
                weights=self.paths.weights,
            ),
        )
        self._engine(
            DEDICATED,
            launch.dedicated(
                self._rollout_engine(DEDICATED, self.ports.dedicated, models / "policy"),
                weights=self.paths.weights,
            ),
        )
        config = self._trainer_config(Arm.FIXED)
        self.warm_up = self._processes.start(
            "warm-up",
            _trainer_command(config, "--warm-only"),
            environment=STEADY_HEAP,
            nice=ROLLOUT_NICE,
        )

    async def engines_ready(self, told: Callable[[str], None]) -> None:
        """Until all three answer; then pinned, the guest under its isolation backend."""
        ports = {
            PRODUCTION: self.ports.production,
            GUEST: self.ports.guest,
            DEDICATED: self.ports.dedicated,
        }
        waiting = [self._answers(name, port, told) for name, port in ports.items()]
        await asyncio.gather(*waiting, self._ended(self.warm_up))
        for name, core in ((PRODUCTION, 0), (GUEST, 0), (DEDICATED, ROLLOUT_CORE)):
            pin(self.engines[name], core)
        renice(self.engines[DEDICATED], ROLLOUT_NICE)
        # The open-loop client lives in this process and must not take turns with production.
        os.sched_setaffinity(0, {ROLLOUT_CORE})
        for process in self.engines[GUEST].tree():
            isolation.apply_to_process(self.isolation, process.pid)
        guest, production = (self.engines[name].process.pid for name in (GUEST, PRODUCTION))
        isolation.check_beside(self.isolation, guest=guest, production=production)

    def start_services(self, level: ServiceLevel) -> None:
        """The node agent and the gateway with its scheduler."""
        self._write_agent_config(level)
        self._service("agent", "agent", "--config", str(self._agent_config))
        gateway = self.paths.run / "gateway.yaml"
        gateway.write_text(yaml.safe_dump(self._gateway_config()))
        self._service("gateway", "gateway", "--config", str(gateway))

    async def services_ready(self, told: Callable[[str], None]) -> None:
        await self._answers("agent", self.ports.agent, told, path="/healthz")
        await self._answers("gateway", self.ports.gateway, told, path="/healthz")

    def promise(self, level: ServiceLevel) -> None:
        """Tell the agent production's SLO; it reloads its file and keeps the old one on error."""
        self._write_agent_config(level)
        os.kill(self.services["agent"].process.pid, signal.SIGHUP)

    def start_trainer(self, arm: Arm) -> Child:
        child = self._processes.start(
            f"trainer-{JOBS[arm]}",
            _trainer_command(self._trainer_config(arm)),
            environment=STEADY_HEAP,
            core=ROLLOUT_CORE,
            # Before the engine, which spins for a second after its last rollout.
            nice=TRAINER_NICE,
            piped=True,
        )
        self.trainers[arm] = child
        return child

    async def part_dies(self) -> None:
        """Raises ConfigError as soon as a part has died; never returns."""
        while True:
            for child in (*self.engines.values(), *self.services.values(), *self.trainers.values()):
                child.check()
            await asyncio.sleep(_POLL_S)

    def _rollout_engine(self, name: str, port: int, model: Path) -> EngineSpec:
        return EngineSpec(
            name=name,
            model=model,
            port=port,
            max_model_len=self.shape.context_tokens,
            max_num_seqs=ROLLOUT_CONCURRENCY,
            vllm=self.vllm,
            # Most contexts are shorter than the 128 tokens of a CPU engine's own block: no prefix
            # would ever be found again.
            extra_arguments=("--block-size", "32"),
        )

    def _engine(self, name: str, command: EngineCommand) -> None:
        temporary = self.paths.run / "tmp"
        temporary.mkdir(exist_ok=True)
        # What vLLM leaves in its temporary directory goes with the run's.
        places = {"VLLM_RPC_BASE_PATH": str(self.paths.pages), "TMPDIR": str(temporary)}
        self.engines[name] = self._processes.start(
            name, command.arguments, environment={**command.environment, **places}
        )

    def _service(self, name: str, *arguments: str) -> None:
        command = (sys.executable, "-m", "harvester.cli", *arguments)
        self.services[name] = self._processes.start(name, command, core=ROLLOUT_CORE)

    async def _answers(
        self, name: str, port: int, told: Callable[[str], None], path: str = "/health"
    ) -> None:
        child = self.engines.get(name) or self.services[name]
        started_s = self._clock.now()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            while not await _ok(session, self.url(port) + path):
                child.check()
                if self._clock.now() - started_s > _START_S:
                    raise ConfigError(f"{name} did not answer within {_START_S:.0f} s: {child.log}")
                await asyncio.sleep(_POLL_S)
        told(f"{name} is up after {self._clock.now() - started_s:.0f} s")

    async def _ended(self, child: Child) -> None:
        while True:
            code = child.process.poll()
            if code == 0:
                return
            child.check()
            await asyncio.sleep(_POLL_S)

    @property
    def _agent_config(self) -> Path:
        return self.paths.run / "agent.yaml"

    def _write_agent_config(self, level: ServiceLevel) -> None:
        config: dict[str, Any] = {
            "node": "demo",
            "mode": "harvest",
            "page_root": str(self.paths.pages),
            "state_dir": str(self.paths.run / "agent"),
            "http": {"port": self.ports.agent},
            "slots": [
                {
                    "name": SLOT,
                    "engine_url": self.url(self.ports.guest),
                    "model": "policy",
                    "concurrency": ROLLOUT_CONCURRENCY,
                    "policy": {
                        "ttft_slo_s": level.ttft_s,
                        "itl_slo_s": level.itl_s,
                        "blocking_ratio": self.isolation.blocking_ratio,
                        # The demo sets its SLO where production alone already misses it now and
                        # then, so every budget would be overspent by production itself.
                        "budget": {"enforced": False},
                        "proof": {"slice_s": 0.5},
                    },
                }
            ],
        }
        temporary = self._agent_config.with_suffix(".new")
        temporary.write_text(yaml.safe_dump(config))
        temporary.replace(self._agent_config)

    def _gateway_config(self) -> dict[str, Any]:
        return {
            "port": self.ports.gateway,
            "engines": [
                {
                    "id": DEDICATED,
                    "url": self.url(self.ports.dedicated),
                    "concurrency": ROLLOUT_CONCURRENCY,
                },
                {
                    "id": GUEST,
                    "kind": "guest",
                    "slot": SLOT,
                    "concurrency": ROLLOUT_CONCURRENCY,
                },
            ],
            "capacity_period_s": 0.25,
            # A step of the demo's policy takes milliseconds: half a second without a token means
            # that production is busy, and at a step's tail the turn goes on where there is room.
            "timeouts": {"guest_stall_s": 0.5},
            # Its contexts are so short that a prefix costs less than a longer tail.
            "routing": {"begun_first": False},
            "agents": [{"id": "demo", "url": self.url(self.ports.agent)}],
            "jobs": [{"id": JOBS[arm], "harvesting": False} for arm in JOBS],
            "state_file": str(self.paths.run / "gateway.sqlite"),
            "journal_dir": str(self.paths.run / "gateway"),
        }

    def _trainer_config(self, arm: Arm) -> Path:
        config = JobConfig(
            job=JOBS[arm],
            gateway_url=self.url(self.ports.gateway),
            weight_root=self.paths.weights,
            store=JOBS[arm],
            cache_dir=self.paths.cache,
            seed=self._seed,
            warm_up=WarmUp(policy=self.shape),
        )
        path = self.paths.run / f"trainer-{JOBS[arm]}.json"
        path.write_text(json.dumps(msgspec.to_builtins(config, enc_hook=str)))
        return path


async def _ok(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def _trainer_command(config: Path, *flags: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "scheduler.demo.job.trainer", "--config", str(config), *flags)


def _histogram_buckets(vllm: Capabilities) -> tuple[str, ...]:
    if not vllm.custom_histogram_buckets:
        return ()
    edges = {
        "time_to_first_token": list(SLO_EDGES_TTFT_S),
        "inter_token_latency": list(SLO_EDGES_ITL_S),
    }
    return ("--custom-histogram-buckets", json.dumps(edges))
