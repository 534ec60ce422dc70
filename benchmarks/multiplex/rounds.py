"""One run of the benchmark: engines, warm policy, preparation, then the arms round by round."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec

from benchmarks.multiplex.arms import BESIDE_PRODUCTION, JOBS, JobShape, MultiplexArm, Run, runs
from benchmarks.multiplex.figures import MultiplexFacts, figures
from benchmarks.multiplex.outcomes import ArmDone, JobDone
from benchmarks.multiplex.rollout_node import RolloutNode
from benchmarks.multiplex.serving_node import ServingNode
from benchmarks.multiplex.training_job import TrainingJob
from benchmarks.testbed.gateway_admin import GatewayAdmin
from benchmarks.testbed.parts import Parts, run_with_watchdog
from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.production import production_session
from benchmarks.testbed.trace import Trace
from examples.grpo.events import StepDone
from scheduler.rollmux.control import on_ray
from scheduler.rollmux.control.control_settings import ControlSettings

_STEP_MAX_S = 180.0
_STARTED = tuple(reversed(JOBS))
_STAGGER_S = 0.25
"""Head start of the job with the shorter rollouts, in s: the first to ask fixes the cycle's order
for good, and with it the makespan, so it is the same job in every arm."""
_PREPARATION = Run(None)
_PORTS = 2 * len(JOBS) + 3


class MultiplexBench:
    def __init__(
        self, parts: Parts, trace: Trace, *, arms: tuple[MultiplexArm, ...], rounds: int, steps: int
    ) -> None:
        self.done: dict[Run, ArmDone] = {}
        self._parts = parts
        self._clock = parts.clock
        self._steps = steps
        self._runs = runs(arms, rounds)
        ports = iter(free_ports(_PORTS))
        serves = any(arm in BESIDE_PRODUCTION for arm in arms)
        self._serving = ServingNode(parts, ports, trace) if serves else None
        self._node = RolloutNode(
            parts,
            ports,
            (_PREPARATION, *self._runs),
            agent_url=self._serving.agent_url if self._serving else None,
        )
        self._started_s = self._clock.now()

    async def run(self) -> dict[str, Any]:
        """Raises RoseMuxError when a part fails."""
        async with production_session() as session:
            engine_cold_s = await self._node.start_first(self._on_progress)
            if self._serving is not None:
                self._serving.start()
            self._node.start_others()
            await self._node.warm_up()
            await self._node.answers(self._on_progress)
            if self._serving is not None:
                await self._serving.answers(session, self._on_progress)
            on_ray.start_control(ControlSettings(journal=self._parts.paths.logs))
            await run_with_watchdog(self._parts.one_dies(), self._rounds())
        facts = MultiplexFacts(
            steps=self._steps, cores=os.cpu_count() or 0, engine_cold_s=engine_cold_s
        )
        if self._serving is None:
            return figures(self.done, facts)
        return figures(self.done, facts, self._serving.served, self._serving.requests)

    async def _rounds(self) -> None:
        for shape in JOBS:
            await self._prepared(shape)
        if self._serving is not None:
            await self._serving.calibrate()
            self._on_progress(f"production at {self._serving.excerpt.rate:.2f} requests/s")
        for run in self._runs:
            self.done[run] = await self._measured(run)
            self._on_progress(f"{run.name}: both jobs in {self.done[run].makespan_s:.1f} s")

    async def _prepared(self, shape: JobShape) -> None:
        leases = self._serving is not None
        async with aiohttp.ClientSession() as session:
            gateway = GatewayAdmin(session, self._node.gateway_url(shape))
            job = await self._loaded(shape, _PREPARATION, steps=1)
            await gateway.harvesting(shape.job(_PREPARATION), enabled=leases)
            await job.done()
            await gateway.harvesting(shape.job(_PREPARATION), enabled=False)
            await job.close()

    async def _measured(self, run: Run) -> ArmDone:
        if run.arm is MultiplexArm.SEQUENTIAL:
            return await self._alone(run)
        running = await asyncio.gather(
            *(self._loaded(shape, run, steps=shape.steps(self._steps)) for shape in _STARTED)
        )
        async with AsyncExitStack() as beside:
            if run.arm in BESIDE_PRODUCTION and self._serving is not None:
                await beside.enter_async_context(self._serving.replaying(run))
            started_s = self._clock.now()
            done = await asyncio.gather(
                *(_after(position * _STAGGER_S, job.done()) for position, job in enumerate(running))
            )
            makespan_s = self._clock.now() - started_s
        for job in running:
            await job.close()
        names = (shape.name for shape in _STARTED)
        return ArmDone(makespan_s=makespan_s, jobs=dict(zip(names, done, strict=True)))

    async def _alone(self, run: Run) -> ArmDone:
        jobs: dict[str, JobDone] = {}
        makespan_s = 0.0
        for shape in JOBS:
            job = await self._loaded(shape, run, steps=shape.steps(self._steps))
            started_s = self._clock.now()
            jobs[shape.name] = await job.done()
            makespan_s += self._clock.now() - started_s
            await job.close()
        return ArmDone(makespan_s=makespan_s, jobs=jobs)

    async def _loaded(self, shape: JobShape, run: Run, *, steps: int) -> "RunningJob":
        """A trainer that has published its first version, which its engine serves."""
        job = RunningJob(self._node, shape, run, steps=steps)
        started_s = self._clock.now()
        await job.actor.loaded.remote()
        job.load_s = self._clock.now() - started_s
        await job.actor.published.remote()
        async with aiohttp.ClientSession() as session:
            gateway = GatewayAdmin(session, self._node.gateway_url(shape))
            await gateway.activate(shape.job(run))
        self._on_progress(f"{shape.job(run)} is loaded after {job.load_s:.1f} s")
        return job

    def _on_progress(self, message: str) -> None:
        elapsed_s = self._clock.now() - self._started_s
        print(f"{elapsed_s:6.0f} s  {message}", file=sys.stderr, flush=True)


async def _after(seconds: float, work: Coroutine[Any, Any, JobDone]) -> JobDone:
    await asyncio.sleep(seconds)
    return await work


class RunningJob:
    def __init__(self, node: RolloutNode, shape: JobShape, run: Run, *, steps: int) -> None:
        import ray

        config = node.trainer_config(shape, run)
        terms = msgspec.json.encode(shape.terms(run)) if run.permitted else None
        remote = ray.remote(TrainingJob).options(num_cpus=0)
        self.actor: Any = remote.remote(str(config), node.engine_url(shape), terms, run.leases)
        self.load_s = 0.0
        self._steps = steps

    async def done(self) -> JobDone:
        """Raises TimeoutError where it takes far too long."""
        async with asyncio.timeout(self._steps * _STEP_MAX_S):
            lines = await self.actor.run.remote(self._steps)
        starts = await self.actor.starts.remote()
        tails = await self.actor.tails.remote()
        steps = tuple(msgspec.json.decode(line, type=StepDone) for line in lines)
        return JobDone(steps=steps, load_s=self.load_s, starts=tuple(starts), tails=tails)

    async def close(self) -> None:
        import ray

        await self.actor.close.remote()
        ray.kill(self.actor)
