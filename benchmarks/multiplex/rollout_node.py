"""The rollout node: one real vLLM engine for each job, resident on one core, with a gateway each.

Jobs have weights of their own, so each has an engine of its own that keeps them: what RollMux calls
residency. A gateway serves its job's runs, one after the other.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks.multiplex.arms import JOBS, REHEARSAL, ROLLOUT_CORE, RUNS, JobShape
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import STEADY_HEAP, EngineSpec
from scheduler.demo.job.config import JobConfig
from scheduler.demo.job.model import PolicyShape, write_checkpoint
from scheduler.demo.job.warm_up import WarmUp
from scheduler.demo.parts import Parts
from scheduler.demo.prerequisites import free_ports
from scheduler.demo.processes import pin
from scheduler.demo.slot import url

CONCURRENCY = 48
_POLL_S = 0.25


class RolloutNode:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._shape = PolicyShape()
        ports = iter(free_ports(2 * len(JOBS)))
        self._engines = {job.name: next(ports) for job in JOBS}
        self._gateways = {job.name: next(ports) for job in JOBS}

    def engine_url(self, job: JobShape) -> str:
        return url(self._engines[job.name])

    def gateway_url(self, job: JobShape) -> str:
        return url(self._gateways[job.name])

    async def start(self, told: Callable[[str], None]) -> float:
        """Until all answer; the seconds of an engine's cold start, of one that started alone."""
        paths = self._parts.paths
        write_checkpoint(paths.run / "policy", self._shape)
        paths.weights.mkdir(parents=True, exist_ok=True)
        started_s = self._parts.clock.now()
        cold_s = 0.0
        for job in JOBS:
            self._start_engine(job)
            await self._parts.answers(_engine(job), self.engine_url(job), told)
            cold_s = cold_s or self._parts.clock.now() - started_s
            pin(self._parts.running[_engine(job)], ROLLOUT_CORE)
        for job in JOBS:
            self._start_gateway(job)
        for job in JOBS:
            await self._parts.answers(_gateway(job), self.gateway_url(job), told, path="/healthz")
        return cold_s

    async def warm_up(self) -> None:
        """Make the warm policy that every run starts from, if it is not cached."""
        config = self.trainer_config(JOBS[0], REHEARSAL)
        child = self._parts.processes.start("warm-up", _warm_only(config), environment=STEADY_HEAP)
        while child.process.poll() != 0:
            child.check()
            await asyncio.sleep(_POLL_S)

    def trainer_config(self, job: JobShape, run: str) -> Path:
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
            "routing": {"begun_first": False},
            "jobs": [{"id": job.job(run), "harvesting": False} for run in RUNS],
            "state_file": str(run / f"{_gateway(job)}.sqlite"),
        }
        path = run / f"{_gateway(job)}.yaml"
        path.write_text(yaml.safe_dump(config))
        self._parts.service(_gateway(job), "gateway", "--config", str(path), core=ROLLOUT_CORE)


def _engine(job: JobShape) -> str:
    return f"rollout-{job.name}"


def _gateway(job: JobShape) -> str:
    return f"gateway-{job.name}"


def _warm_only(config: Path) -> tuple[str, ...]:
    import sys

    trainer = "scheduler.demo.job.trainer"
    return (sys.executable, "-m", trainer, "--config", str(config), "--warm-only")
