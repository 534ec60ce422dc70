"""What phase permits bring two jobs on two nodes: `python -m benchmarks.multiplex --json PATH`.

Two real RL jobs of different length on a rollout node (core 0, vLLM) and a training node (core 1),
on Ray: one after the other, both at once, and multiplexed by permits. See README.md beside this.
"""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.multiplex.arms import JOBS, REHEARSAL, Arm, JobShape
from benchmarks.multiplex.figures import ArmDone, JobDone, figures
from benchmarks.multiplex.rollout_node import RolloutNode
from benchmarks.multiplex.training_job import TrainingJob
from benchmarks.reporting import report
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError
from scheduler.demo.gateway_admin import GatewayAdmin
from scheduler.demo.job.events import StepDone
from scheduler.demo.parts import Parts
from scheduler.demo.processes import Processes
from scheduler.demo.run_directory import run_directory
from scheduler.demo.session import unless
from scheduler.phases import on_ray
from scheduler.policy.phases.terms import PermitsConfig

ORDER = (Arm.SEQUENTIAL, Arm.MULTIPLEXED, Arm.NAIVE)
_OBJECT_STORE_BYTES = 80 << 20
_STEP_MAX_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.multiplex", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6, help="of the large job, in each arm")
    parser.add_argument("--cache", type=Path, help="where the warm policy is kept between runs")
    given = parser.parse_args()
    report("multiplex", lambda: measured(given), given.json)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("benchmarks.multiplex needs Ray: install the extra 'ray'") from error
    out = given.json.parent / f"{given.json.stem}.run"
    cache = given.cache or out / "cache"
    with run_directory(out, cache=cache) as paths, Processes(paths.logs) as processes:
        ray.init(
            num_cpus=2,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
        )
        # Ray takes the signal over, and ends without a word.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            parts = Parts(processes=processes, paths=paths, clock=MonotonicClock())
            return asyncio.run(Bench(parts, given.steps).run())
        finally:
            ray.shutdown()


class Bench:
    """One run: engines, the warm policy, then the arms."""

    def __init__(self, parts: Parts, steps: int) -> None:
        self._parts = parts
        self._steps = steps
        self._clock = parts.clock
        self._node = RolloutNode(parts)
        self._started_s = self._clock.now()

    async def run(self) -> dict[str, Any]:
        """Raises RoseMuxError when a part fails."""
        engine_cold_s = await self._node.start(self._told)
        await self._node.warm_up()
        on_ray.started(PermitsConfig(), journal=self._parts.paths.logs)
        arms = await unless(self._parts.one_dies(), self._arms())
        facts = {"steps": self._steps, "cores": os.cpu_count(), "order": [*ORDER]}
        return figures(arms, engine_cold_s=engine_cold_s) | {"facts": facts}

    async def _arms(self) -> dict[Arm, ArmDone]:
        for shape in JOBS:
            rehearsal = await self._loaded(shape, REHEARSAL, steps=1)
            await rehearsal.done()
            await rehearsal.close()
        done: dict[Arm, ArmDone] = {}
        for arm in ORDER:
            done[arm] = await (self._alone() if arm is Arm.SEQUENTIAL else self._together(arm))
            self._told(f"{arm}: both jobs in {done[arm].makespan_s:.1f} s")
        return done

    async def _alone(self) -> ArmDone:
        jobs: dict[str, JobDone] = {}
        makespan_s = 0.0
        for shape in JOBS:
            job = await self._loaded(shape, Arm.SEQUENTIAL, steps=shape.steps(self._steps))
            started_s = self._clock.now()
            jobs[shape.name] = await job.done()
            makespan_s += self._clock.now() - started_s
            await job.close()
        return ArmDone(makespan_s=makespan_s, jobs=jobs)

    async def _together(self, arm: Arm) -> ArmDone:
        running = [await self._loaded(shape, arm, steps=shape.steps(self._steps)) for shape in JOBS]
        started_s = self._clock.now()
        done = await asyncio.gather(*(job.done() for job in running))
        makespan_s = self._clock.now() - started_s
        for job in running:
            await job.close()
        names = (shape.name for shape in JOBS)
        return ArmDone(makespan_s=makespan_s, jobs=dict(zip(names, done, strict=True)))

    async def _loaded(self, shape: JobShape, run: str, *, steps: int) -> "RunningJob":
        """A trainer that has published its first version, which its engine serves."""
        job = RunningJob(self._node, shape, run, steps=steps)
        started_s = self._clock.now()
        await job.actor.loaded.remote()
        job.load_s = self._clock.now() - started_s
        await job.actor.published.remote()
        async with aiohttp.ClientSession() as session:
            gateway = GatewayAdmin(session, self._node.gateway_url(shape))
            await gateway.activate(shape.job(run))
        self._told(f"{shape.job(run)} is loaded after {job.load_s:.1f} s")
        return job

    def _told(self, message: str) -> None:
        elapsed_s = self._clock.now() - self._started_s
        print(f"{elapsed_s:6.0f} s  {message}", file=sys.stderr, flush=True)


class RunningJob:
    def __init__(self, node: RolloutNode, shape: JobShape, run: str, *, steps: int) -> None:
        import ray

        config = node.trainer_config(shape, run)
        terms = msgspec.json.encode(shape.terms(run)) if run == Arm.MULTIPLEXED else None
        remote = ray.remote(TrainingJob).options(num_cpus=0)
        self.actor: Any = remote.remote(str(config), node.engine_url(shape), terms)
        self.load_s = 0.0
        self._steps = steps

    async def done(self) -> JobDone:
        """Raises TimeoutError where it takes far too long."""
        async with asyncio.timeout(self._steps * _STEP_MAX_S):
            lines = await self.actor.run.remote(self._steps)
        starts = await self.actor.starts.remote()
        steps = tuple(msgspec.json.decode(line, type=StepDone) for line in lines)
        return JobDone(steps=steps, load_s=self.load_s, starts=tuple(starts))

    async def close(self) -> None:
        import ray

        await self.actor.close.remote()
        ray.kill(self.actor)


if __name__ == "__main__":
    main()
