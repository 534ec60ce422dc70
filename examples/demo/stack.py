"""The real parts of the demo on one machine, their cores and their settings.

core 0    the serving slot's engines
core 1    the dedicated rollout engine and the trainers (niced: they stand for other machines),
          agent, gateway and the open-loop client in front of them
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks.testbed.parts import Parts, RunPaths
from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.processes import Child, Processes, pin, renice
from benchmarks.testbed.slo import ServiceLevel
from benchmarks.testbed.slot import (
    GUEST,
    ROLLOUT_CORE,
    ROLLOUT_PLACES,
    SLOT,
    ServingSlot,
    SlotPorts,
    url,
)
from coserve.vllm import launch
from coserve.vllm.launch import HUGE_PAGES, STEADY_HEAP
from examples.demo.records import DemoArm
from examples.grpo.config import JobConfig
from examples.grpo.warm_up import WarmUp
from harvester.contracts.clock import MonotonicClock

ROLLOUT_NICE = 10
TRAINER_NICE = 5
DEDICATED = "dedicated-0"
GATEWAY = "gateway"
JOBS = {DemoArm.FIXED: "fixed", DemoArm.HARVEST: "harvest"}
_POLL_S = 0.25
_CHECKOUT = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, (str(Path(__file__).parents[2].resolve()), os.environ.get("PYTHONPATH")))
    )
}
"""The trainer is a module of the checkout, which is not installed."""


class Stack:
    """Started by `start_engines`, then `start_services`, then `start_trainer` for each job."""

    def __init__(self, processes: Processes, paths: RunPaths, *, seed: int) -> None:
        production, guest, agent, self._dedicated, self._gateway = free_ports(5)
        self.paths = paths
        self.parts = Parts(processes=processes, paths=paths, clock=MonotonicClock())
        self.slot = ServingSlot(
            self.parts, SlotPorts(production=production, guest=guest, agent=agent)
        )
        self._seed = seed

    @property
    def production_url(self) -> str:
        return url(self.slot.ports.production)

    @property
    def gateway_url(self) -> str:
        return url(self._gateway)

    def rollout_urls(self) -> dict[str, str]:
        return {GUEST: url(self.slot.ports.guest), DEDICATED: url(self._dedicated)}

    def start_engines(self) -> None:
        """Start the three engines and the policy's warm-up; nothing is waited for."""
        self.slot.start_engines()
        self.parts.engine(
            DEDICATED,
            launch.dedicated(
                self.slot.rollout_engine(DEDICATED, self._dedicated), weights=self.paths.weights
            ),
        )
        config = self._trainer_config(DemoArm.FIXED)
        self._warm_up = self.parts.processes.start(
            "warm-up",
            _trainer_command(config, "--warm-only"),
            environment=STEADY_HEAP | _CHECKOUT,
            nice=ROLLOUT_NICE,
        )

    async def engines_ready(self, on_progress: Callable[[str], None]) -> None:
        """Waits until all three answer; then pins them, the guest under its isolation backend."""
        await asyncio.gather(
            self.slot.engines_answer(on_progress),
            self.parts.answers(DEDICATED, url(self._dedicated), on_progress),
        )
        self.slot.bind()
        # The first replay of production's load goes on beside it.
        pin(self._warm_up, ROLLOUT_CORE)
        dedicated = self.parts.running[DEDICATED]
        pin(dedicated, ROLLOUT_CORE)
        renice(dedicated, ROLLOUT_NICE)

    def start_services(self, level: ServiceLevel) -> None:
        """The node agent and the gateway with its scheduler."""
        self.slot.start_agent(self.slot.proven(level))
        config = self.paths.run / "gateway.yaml"
        config.write_text(yaml.safe_dump(self._gateway_config()))
        self.parts.service(GATEWAY, "gateway", "--config", str(config), core=ROLLOUT_CORE)

    async def services_ready(self, on_progress: Callable[[str], None]) -> None:
        await self.slot.agent_answers(on_progress)
        await self.parts.answers(GATEWAY, self.gateway_url, on_progress, path="/healthz")

    def promise(self, level: ServiceLevel) -> None:
        """Tell the agent production's SLO."""
        self.slot.instruct(self.slot.proven(level))

    def start_trainer(self, arm: DemoArm) -> Child:
        name = f"trainer-{JOBS[arm]}"
        child = self.parts.processes.start(
            name,
            _trainer_command(self._trainer_config(arm)),
            environment=STEADY_HEAP | HUGE_PAGES | _CHECKOUT,
            core=ROLLOUT_CORE,
            # Before the engine, which spins for a second after its last rollout.
            nice=TRAINER_NICE,
            piped=True,
        )
        self.parts.running[name] = child
        return child

    async def warmed_up(self) -> None:
        """Waits for the warm policy, which both trainers begin with."""
        while self._warm_up.process.poll() != 0:
            self._warm_up.check()
            await asyncio.sleep(_POLL_S)

    def _gateway_config(self) -> dict[str, Any]:
        return {
            "port": self._gateway,
            "engines": [
                {"id": DEDICATED, "url": url(self._dedicated), "concurrency": ROLLOUT_PLACES},
                {"id": GUEST, "kind": "guest", "slot": SLOT, "concurrency": ROLLOUT_PLACES},
            ],
            "capacity_period_s": 0.25,
            # A step of the demo's policy takes milliseconds: half a second without a token means
            # that production is busy, and at a step's tail the turn goes on where there is room.
            # At the tail: a few times what eight tokens, one chunk, take in a full batch.
            "timeouts": {"guest_stall_s": 0.5, "guest_tail_stall_s": 0.2},
            # Its contexts are so short that a prefix costs less than a longer tail.
            "routing": {"begun_first": False},
            "agents": [{"id": "demo", "url": url(self.slot.ports.agent)}],
            "jobs": [{"id": JOBS[arm], "harvesting": False} for arm in JOBS],
            "state_file": str(self.paths.run / "gateway.sqlite"),
            "journal_dir": str(self.paths.run / "gateway"),
        }

    def _trainer_config(self, arm: DemoArm) -> Path:
        config = JobConfig(
            job=JOBS[arm],
            gateway_url=self.gateway_url,
            weight_root=self.paths.weights,
            store=JOBS[arm],
            cache_dir=self.paths.cache,
            seed=self._seed,
            warm_up=WarmUp(policy=self.slot.shape),
        )
        path = self.paths.run / f"trainer-{JOBS[arm]}.json"
        path.write_text(json.dumps(msgspec.to_builtins(config, enc_hook=str)))
        return path


def _trainer_command(config: Path, *flags: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "examples.grpo.trainer", "--config", str(config), *flags)
