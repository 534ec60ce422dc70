"""The rollout node: one real vLLM engine for each job, resident on one core, with a gateway each.

Jobs have weights of their own, so each has an engine of its own that keeps them: what RollMux calls
residency. A gateway serves its job's runs, one after the other; all of them ask the same agent for
its slot, where there is one.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks.multiplex.arms import JOBS, ROLLOUT_CORE, JobShape, Run
from benchmarks.testbed.parts import Parts
from benchmarks.testbed.processes import pin
from benchmarks.testbed.slot import url
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import STEADY_HEAP, EngineSpec
from examples.grpo.config import JobConfig
from examples.grpo.model import write_checkpoint
from examples.grpo.policy_shape import PolicyShape
from examples.grpo.warm_up import WarmUp

CONCURRENCY = 48
_POLL_S = 0.25


class RolloutNode:
    """`start_first`, `start_others`, then `answers`."""

    def __init__(
        self, parts: Parts, ports: Iterator[int], runs: tuple[Run, ...], *, agent_url: str | None
    ) -> None:
        self._parts = parts
        self._shape = PolicyShape()
        self._runs = runs
        self._agent_url = agent_url
        self._engines = {job.name: next(ports) for job in JOBS}
        self._gateways = {job.name: next(ports) for job in JOBS}

    def engine_url(self, job: JobShape) -> str:
        return url(self._engines[job.name])

    def gateway_url(self, job: JobShape) -> str:
        return url(self._gateways[job.name])

    async def start_first(self, on_progress: Callable[[str], None]) -> float:
        """The seconds of an engine's cold start, of one that starts alone."""
        paths = self._parts.paths
        write_checkpoint(paths.run / "policy", self._shape)
        paths.weights.mkdir(parents=True, exist_ok=True)
        started_s = self._parts.clock.now()
        self._start_engine(JOBS[0])
        await self._parts.answers(_engine(JOBS[0]), self.engine_url(JOBS[0]), on_progress)
        return self._parts.clock.now() - started_s

    def start_others(self) -> None:
        """Nothing is waited for."""
        for job in JOBS[1:]:
            self._start_engine(job)
        for job in JOBS:
            self._start_gateway(job)

    async def answers(self, on_progress: Callable[[str], None]) -> None:
        """Waits until all answer; the engines are on their core then."""
        for job in JOBS:
            await self._parts.answers(_engine(job), self.engine_url(job), on_progress)
            pin(self._parts.running[_engine(job)], ROLLOUT_CORE)
        for job in JOBS:
            await self._parts.answers(
                _gateway(job), self.gateway_url(job), on_progress, path="/healthz"
            )

    async def warm_up(self) -> None:
        """Make the warm policy that every run starts from, if it is not cached."""
        config = self.trainer_config(JOBS[0], self._runs[0])
        child = self._parts.processes.start("warm-up", _warm_only(config), environment=STEADY_HEAP)
        while child.process.poll() != 0:
            child.check()
            await asyncio.sleep(_POLL_S)

    def trainer_config(self, job: JobShape, run: Run) -> Path:
        name = job.job(run)
        config = JobConfig(
            job=name,
            gateway_url=self.gateway_url(job),
            weight_root=self._parts.paths.weights,
            store=name,
            cache_dir=self._parts.paths.cache,
            seed=job.seed,
            samples_per_prompt=job.samples_per_prompt,
            warm_up=WarmUp(policy=self._shape),
        )
        path = self._parts.paths.run / f"{name}.json"
        path.write_text(json.dumps(msgspec.to_builtins(config, enc_hook=str)))
        return path

    def _start_engine(self, job: JobShape) -> None:
        spec = EngineSpec(
            name=_engine(job),
            model=self._parts.paths.run / "policy",
            port=self._engines[job.name],
            max_model_len=self._shape.context_tokens,
            max_num_seqs=CONCURRENCY,
            vllm=capabilities(installed_vllm_version()),
            extra_arguments=("--block-size", "32"),
        )
        self._parts.engine(_engine(job), launch.dedicated(spec, weights=self._parts.paths.weights))

    def _start_gateway(self, job: JobShape) -> None:
        run = self._parts.paths.run
        config: dict[str, Any] = {
            "port": self._gateways[job.name],
            "engines": [
                {"id": _engine(job), "url": self.engine_url(job), "concurrency": CONCURRENCY}
            ],
            # Half a second without a token means that production or a trainer has the core.
            "timeouts": {"guest_stall_s": 0.5},
            "routing": {"begun_first": False},
            "capacity_period_s": 0.25,
            # A job that leases switches it on itself, for the length of its rollouts.
            "jobs": [{"id": job.job(each), "harvesting": False} for each in self._runs],
            "state_file": str(run / f"{_gateway(job)}.sqlite"),
            "journal_dir": str(run.parent / _gateway(job)),
        }
        if self._agent_url is not None:
            config["agents"] = [{"id": "serving", "url": self._agent_url}]
        path = run / f"{_gateway(job)}.yaml"
        path.write_text(yaml.safe_dump(config))
        self._parts.service(_gateway(job), "gateway", "--config", str(path), core=ROLLOUT_CORE)


def _engine(job: JobShape) -> str:
    return f"rollout-{job.name}"


def _gateway(job: JobShape) -> str:
    return f"gateway-{job.name}"


def _warm_only(config: Path) -> tuple[str, ...]:
    trainer = "examples.grpo.trainer"
    return (sys.executable, "-m", trainer, "--config", str(config), "--warm-only")
