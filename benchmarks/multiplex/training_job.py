"""One RL job in a process of its own on the training core: a Ray actor around the demo's trainer.

With a phase control its rollouts and its training wait for their permits; without, it runs as fast
as the cores let it. The process stays between phases, with the weights and the optimizer in its
memory: that is the warm start.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.multiplex.arms import TRAINER_NICE, TRAINING_CORE
from examples.grpo.config import read_config
from examples.grpo.environment import Task
from examples.grpo.rollout import StepBatch
from examples.grpo.training_run import Collects, TrainingRun
from scheduler.model import PhaseKind
from scheduler.rollmux.control import on_ray
from scheduler.rollmux.control.job_gateway import GatewayAccess
from scheduler.rollmux.control.permit import Permit
from scheduler.rollmux.control.phase_client import PhaseClient, Start
from scheduler.rollmux.permits.leased_tail import TailEnd
from scheduler.rollmux.permits.terms import JobTerms

_ANSWER_S = 5.0


class TrainingJob:
    """Its methods are an actor's: `loaded`, `published`, then `run`, then `starts` and `tails`."""

    def __init__(self, config: str, engine_url: str, terms: bytes | None, leases: bool) -> None:
        _settle()
        self._config = read_config(Path(config))
        self._engine_url = engine_url
        self._phases: PhasedRun | None = None
        if terms is not None:
            job_terms = msgspec.json.decode(terms, type=JobTerms)
            gateway = GatewayAccess(url=self._config.gateway_url) if leases else None
            client = PhaseClient(on_ray.connect(), job_terms, gateway=gateway)
            self._phases = PhasedRun(client)
        self._stack = AsyncExitStack()
        self._run: TrainingRun | None = None

    async def loaded(self) -> None:
        """The trainer could begin a phase now."""
        from examples.grpo.master_weights import MasterWeights, policy_of
        from examples.grpo.trainer import opened_run
        from examples.grpo.warm_up import use_one_thread, warm_start

        use_one_thread()
        config = self._config
        warm = warm_start(config.warm_up, config.cache_dir)
        weights = MasterWeights(policy_of(config.warm_up.policy, warm.state), config.adam)
        hooks: dict[str, Any] = {}
        if self._phases is not None:
            hooks = {"around_collect": self._phases.around, "on_progress": self._phases.progress}
        opened = opened_run(config, weights, **hooks)
        self._run = await self._stack.enter_async_context(opened)
        if self._phases is not None:
            self._phases.client.resident(
                PhaseKind.ROLLOUT, on_resume=lambda _cold: _answers(self._engine_url)
            )

    async def published(self) -> None:
        assert self._run is not None
        await self._run.publish()

    async def run(self, steps: int) -> list[bytes]:
        """The events of its steps."""
        assert self._run is not None
        done = []
        for _ in range(steps):
            done.append(msgspec.json.encode(await self._run.step()))
            if self._phases is not None:
                await self._phases.trained()
        if self._phases is not None:
            await asyncio.to_thread(self._phases.client.forget)
        return done

    async def starts(self) -> list[dict[str, Any]]:
        """Starts of its phases."""
        if self._phases is None:
            return []
        return [_plain(start) for start in self._phases.client.starts]

    async def tails(self) -> dict[str, float]:
        """Outcomes of its rollouts' tails: counts and seconds; all 0 without leases."""
        tails = [] if self._phases is None else self._phases.client.tails
        ends = [tail.end for tail in tails]
        return {
            "moved": len(tails),
            "seconds": sum(tail.seconds for tail in tails),
            "returned": ends.count(TailEnd.RETURNED),
            "lost": ends.count(TailEnd.LEASE_LOST),
        }

    async def close(self) -> None:
        await self._stack.aclose()


class PhasedRun:
    """Rollouts under one permit, then update, publish and switch under the other."""

    def __init__(self, client: PhaseClient) -> None:
        self.client = client
        self._rollout: Permit | None = None
        self._training: Permit | None = None

    def around(self, collector: Collects) -> Collects:
        return _PhasedCollector(collector, self)

    def progress(self, complete_ratio: float) -> None:
        if self._rollout is not None:
            self._rollout.progress(complete_ratio)

    async def rolled_out(self, collector: Collects, tasks: Sequence[Task], **at: int) -> StepBatch:
        async with self.client.phase(PhaseKind.ROLLOUT) as self._rollout:
            batch = await collector.collect(tasks, **at)
        self._rollout = None
        self._training = await asyncio.to_thread(self.client.begin, PhaseKind.TRAINING)
        return batch

    async def trained(self) -> None:
        assert self._training is not None
        await asyncio.to_thread(self.client.end, self._training)


class _PhasedCollector:
    def __init__(self, collector: Collects, phases: PhasedRun) -> None:
        self._collector = collector
        self._phases = phases

    async def collect(self, tasks: Sequence[Task], *, step: int, version: int) -> StepBatch:
        return await self._phases.rolled_out(self._collector, tasks, step=step, version=version)


def _settle() -> None:
    """All threads of this process onto the training core, behind production."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {TRAINING_CORE})
        nice = os.getpriority(os.PRIO_PROCESS, int(thread.name))
        os.setpriority(os.PRIO_PROCESS, int(thread.name), max(nice, TRAINER_NICE))


def _answers(url: str) -> None:
    """The engine is there, as its phase's first line needs it."""
    import urllib.request

    with urllib.request.urlopen(f"{url}/health", timeout=_ANSWER_S):
        return


def _plain(start: Start) -> dict[str, Any]:
    return {
        "kind": start.kind.value,
        "cold": start.cold,
        "waited_s": start.waited_s,
        "resume_s": start.resume_s,
    }
