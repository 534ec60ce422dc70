"""One serving slot of real parts: a production engine, a guest beside it, the node's agent.

    core          both engines; the guest in the isolation backend's class
    agent_core    the agent, and the caller with its open-loop client

Engines start on both cores, because starting is import-bound, and are pinned once they answer.
Where they are on a GPU nothing is pinned, and the guest starts once production answers.
"""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.testbed.hardware import CpuHardware, Hardware, RolloutLoad
from benchmarks.testbed.parts import Parts
from benchmarks.testbed.processes import freeze, pin, thaw
from benchmarks.testbed.production_model import write_production_checkpoint
from benchmarks.testbed.slo import SLO_EDGES_ITL_S, SLO_EDGES_TTFT_S, ServiceLevel
from benchmarks.testbed.unpaced_start import unpaced
from coserve.guest import isolation
from coserve.guest.isolation import Isolation
from coserve.vllm import launch
from coserve.vllm.capabilities import Capabilities, capabilities, installed_vllm_version
from coserve.vllm.launch import EngineSpec
from examples.grpo.policy_shape import PolicyShape
from harvester.contracts.page import PageDirectory
from harvester.platform import whole_file

SERVING_CORE = 0
ROLLOUT_CORE = 1
SLOT = "slot-0"
PRODUCTION = "production"
STOCK = "stock"
GUEST = "guest-0"
AGENT = "agent"
ROLLOUT_CONCURRENCY = RolloutLoad().concurrency
ROLLOUT_PLACES = RolloutLoad().places
PRODUCTION_MAX_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPorts:
    production: int
    guest: int
    agent: int
    stock: int | None = None
    """A second production engine, without any part of RoseMux; None starts none."""


@dataclass(slots=True)
class ServingSlot:
    """Started by `start_engines` and `start_agent`; once the engines answer, by `bind`."""

    parts: Parts
    ports: SlotPorts
    hardware: Hardware = field(default_factory=CpuHardware)
    shape: PolicyShape = field(default_factory=PolicyShape)
    isolation: Isolation = field(default_factory=isolation.choose)
    vllm: Capabilities = field(default_factory=lambda: capabilities(installed_vllm_version()))
    core: int = SERVING_CORE
    agent_core: int = ROLLOUT_CORE
    concurrency: int = ROLLOUT_CONCURRENCY
    """The guest's batch."""
    places: int = ROLLOUT_PLACES
    production_context: int = PRODUCTION_MAX_LEN
    """Tokens of production's longest request."""
    production_arguments: tuple[str, ...] = ()
    """Arguments for vLLM, besides the demo's."""
    pages: PageDirectory = field(init=False)
    shipped: bool = True
    """Whether the running agent is the shipped one."""
    shipped_state: Path | None = None
    """State directory of the shipped agent, where it outlives the run."""

    def __post_init__(self) -> None:
        self.pages = PageDirectory.create(self.parts.paths.pages / SLOT)

    @property
    def policy_model(self) -> Path:
        return self.parts.paths.run / "models" / "policy"

    def start_engines(self) -> None:
        """Nothing is waited for. A guest that starts in its turn starts in `engines_answer`."""
        paths = self.parts.paths
        write_production_checkpoint(
            paths.run / "models" / PRODUCTION,
            context_tokens=self.production_context,
            shape=self.hardware.shape,
        )
        self.hardware.write_policy(self.policy_model, self.shape)
        paths.weights.mkdir(parents=True, exist_ok=True)
        self.start_production()
        if self.ports.stock is not None:
            self.parts.engine(
                STOCK,
                launch.stock(self._production_engine(STOCK, self.ports.stock)),
                # Not even the entry points of an installed RoseMux are loaded.
                self.hardware.engine_environment(paths.cache) | {"VLLM_PLUGINS": ""},
            )
        if not self.hardware.starts_in_turn:
            self.start_guest()

    def start_production(self) -> None:
        """Starts production, also again after its end."""
        self.parts.engine(
            PRODUCTION,
            launch.production(
                self._production_engine(PRODUCTION, self.ports.production), pages=self.pages.path
            ),
            self.hardware.engine_environment(self.parts.paths.cache),
        )

    def _production_engine(self, name: str, port: int) -> EngineSpec:
        return EngineSpec(
            name=name,
            model=self.parts.paths.run / "models" / PRODUCTION,
            port=port,
            max_model_len=self.production_context,
            max_num_seqs=self.hardware.production_requests,
            vllm=self.vllm,
            gpu=self.hardware.production(),
            extra_arguments=(
                *("--load-format", "dummy"),
                *("--max-num-batched-tokens", str(self.hardware.step_tokens)),
                *_histogram_buckets(self.vllm),
                *self.hardware.engine_arguments(),
                *self.production_arguments,
            ),
        )

    def start_guest(self) -> None:
        """Starts the guest, also again after its end."""
        paths = self.parts.paths
        self.parts.engine(
            GUEST,
            launch.guest(
                self.rollout_engine(GUEST, self.ports.guest),
                pages=self.pages.path,
                weights=paths.weights,
                isolation=self.hardware.isolation_at_start(self.isolation),
            ),
            self.hardware.engine_environment(paths.cache),
        )

    async def production_answers(self, on_progress: Callable[[str], None]) -> None:
        """Waits for a separately started production, and pins it to the slot's core."""
        await self.parts.answers(PRODUCTION, url(self.ports.production), on_progress)
        pin(self.parts.running[PRODUCTION], self.hardware.core(self.core))

    def rollout_engine(self, name: str, port: int) -> EngineSpec:
        return EngineSpec(
            name=name,
            model=self.policy_model,
            port=port,
            max_model_len=self.hardware.policy_context(self.shape),
            max_num_seqs=self.concurrency,
            vllm=self.vllm,
            gpu=self.hardware.guest(),
            extra_arguments=(*self.hardware.guest_arguments(), *self.hardware.engine_arguments()),
        )

    async def engines_answer(self, on_progress: Callable[[str], None]) -> None:
        """A guest that starts in its turn starts here, and the agent after this."""
        await self.parts.answers(PRODUCTION, url(self.ports.production), on_progress)
        if self.ports.stock is not None:
            await self.parts.answers(STOCK, url(self.ports.stock), on_progress)
        if not self.hardware.starts_in_turn:
            await self.parts.answers(GUEST, url(self.ports.guest), on_progress)
            return
        async with unpaced(self.pages):
            self.start_guest()
            await self.parts.answers(GUEST, url(self.ports.guest), on_progress)

    def bind(self) -> None:
        """Pin both engines, and put the guest under its isolation backend.

        Raises Unsupported where the backend would do nothing.
        """
        running = self.parts.running
        for name in running.keys() & {PRODUCTION, STOCK, GUEST}:
            pin(running[name], self.hardware.core(self.core))
        client_core = self.hardware.core(self.agent_core)
        if client_core is not None:
            # The open-loop client lives in this process and should not take turns with production.
            os.sched_setaffinity(0, {client_core})
        self.isolate(self.isolation)
        guest, production = (
            [process.pid for process in running[name].tree()] for name in (GUEST, PRODUCTION)
        )
        isolation.check_beside(self.isolation, guest=guest, production=production)

    def isolate(self, backend: Isolation) -> None:
        """Put every process of the guest under `backend`, as far as the hardware can."""
        guest = self.parts.running[GUEST]
        pids = [process.pid for process in guest.tree()]
        self.hardware.isolate(pids, first=guest.process.pid, backend=backend)

    def start_agent(self, policy: dict[str, Any], *, shipped: bool = True) -> None:
        self.shipped = shipped
        self._write_agent_config(policy)
        self.parts.service(
            AGENT,
            "agent",
            "--config",
            str(self._agent_config),
            core=self.hardware.core(self.agent_core),
        )

    async def agent_answers(self, on_progress: Callable[[str], None]) -> None:
        await self.parts.answers(AGENT, url(self.ports.agent), on_progress, path="/healthz")

    async def replace_agent(self, policy: dict[str, Any], *, shipped: bool) -> None:
        """The other agent takes the slot over, with a state of its own."""
        child = self.parts.running.pop(AGENT)
        await asyncio.to_thread(self.parts.processes.end, child)
        self.start_agent(policy, shipped=shipped)
        await self.agent_answers(lambda _: None)

    def show_stock(self, *, alone: bool) -> None:
        """Freeze all but the stock engine, or the stock engine: frozen processes take no time."""
        if self.ports.stock is None:
            return
        # An agent that saw a frozen engine would count it as hung: first to go, last to return.
        names = (AGENT, GUEST, PRODUCTION)
        for name in names if alone else (STOCK,):
            freeze(self.parts.running[name])
        for name in (STOCK,) if alone else reversed(names):
            thaw(self.parts.running[name])

    def instruct(self, policy: dict[str, Any]) -> None:
        """Give the agent another policy; it reloads its file and keeps the old one on error."""
        self._write_agent_config(policy)
        os.kill(self.parts.running[AGENT].process.pid, signal.SIGHUP)

    def policy(self, level: ServiceLevel) -> dict[str, Any]:
        """Nothing but the SLO over the shipped defaults."""
        return {"ttft_slo_s": level.ttft_s, "itl_slo_s": level.itl_s}

    def proven(self, level: ServiceLevel) -> dict[str, Any]:
        """As if the slot had proven itself: minutes are measured, not its first half hour."""
        return {**self.policy(level), "proof": {"proving_s": 0.0}}

    def experiment(self, level: ServiceLevel) -> dict[str, Any]:
        """Settings that rules of others are put over, and which keep no error budget."""
        return {
            **self.proven(level),
            "blocking_ratio": self.isolation.blocking_ratio,
            "budget": {"enforced": False},
        }

    @property
    def _agent_config(self) -> Path:
        return self.parts.paths.run / "agent.yaml"

    def _write_agent_config(self, policy: dict[str, Any]) -> None:
        paths = self.parts.paths
        state = paths.run / AGENT
        if self.shipped:
            state = self.shipped_state or paths.run / f"{AGENT}-shipped"
        config: dict[str, Any] = {
            "node": "demo",
            "mode": "harvest",
            # Laws of others, and arms without one, are measured here.
            "unsafe_experiments": not self.shipped,
            "page_root": str(paths.pages),
            "state_dir": str(state),
            "http": {"port": self.ports.agent},
            "slots": [
                {
                    "name": SLOT,
                    "engine_url": url(self.ports.guest),
                    "model": "policy",
                    "concurrency": self.places,
                    "policy": policy,
                }
            ],
        }
        whole_file.write_whole(self._agent_config, yaml.safe_dump(config))


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _histogram_buckets(vllm: Capabilities) -> tuple[str, ...]:
    if not vllm.custom_histogram_buckets:
        return ()
    edges = {
        "time_to_first_token": list(SLO_EDGES_TTFT_S),
        "inter_token_latency": list(SLO_EDGES_ITL_S),
    }
    return ("--custom-histogram-buckets", json.dumps(edges))
