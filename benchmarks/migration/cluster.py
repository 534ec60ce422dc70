"""Two real engines and a gateway in this process, so that a turn can be moved at a chosen token."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.migration.model import ENGINE_ARGUMENTS
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import EngineSpec, dedicated
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.ids import JobId, TrajectoryId, WeightVersion
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.policy.turn import Turn, TurnCounters
from scheduler.gateway.policy.versions_events import VersionPublished
from scheduler.gateway.requests import decode_generate
from scheduler.gateway.running_attempt import CutReason, RunningAttempt
from scheduler.gateway.scheduler import Scheduler
from scheduler.gateway.settings import GatewaySettings

JOB = JobId("job")
_UP_S = 1800.0
_ADAPTERS_BY_NAME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@contextmanager
def engines(
    model: Path,
    *,
    ports: list[int],
    context_tokens: int,
    logs: Path,
    arguments: tuple[str, ...] = (),
) -> Iterator[None]:
    """Dedicated rollout engines in float32, as the launcher starts them, one a core."""
    processes = []
    try:
        for index, port in enumerate(ports):
            spec = EngineSpec(
                name=f"e{index}",
                model=model,
                port=port,
                core=index % (os.cpu_count() or 1),
                max_model_len=context_tokens,
                max_num_seqs=8,
                vllm=capabilities(installed_vllm_version()),
                extra_arguments=(*ENGINE_ARGUMENTS, *arguments),
            )
            command = dedicated(spec, weights=logs)
            with (logs / f"e{index}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command.arguments,
                        env=os.environ | _ADAPTERS_BY_NAME | command.environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Cluster:
    def __init__(
        self, scheduler: Scheduler, session: aiohttp.ClientSession, urls: list[str]
    ) -> None:
        self.scheduler = scheduler
        self.clock = MonotonicClock()
        self._session = session
        self._urls = urls

    async def ready(self) -> None:
        """Raises TimeoutError unless all engines serve and go on from each other's output."""
        async with asyncio.timeout(_UP_S):
            members = self.scheduler.fleet.members
            while not all(m.up and m.is_described and m.resumes for m in members.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.2)

    async def turn(
        self,
        name: str,
        prompt: list[int],
        sampling: dict[str, Any],
        *,
        moves: Sequence[int] = (),
        moves_s: Sequence[float] = (),
    ) -> Turn:
        """Serves a turn, which leaves its engine at each number of tokens of `moves`, streamed, or
        at each time of `moves_s`, in s from its start, as a whole reply, whose tokens are read
        together.

        At the first it goes to the other engine, later to either: a stalled engine is avoided for
        some seconds.
        """
        body = {"request_id": name, "token_ids": prompt, "sampling_params": sampling}
        request = decode_generate(json.dumps(body).encode())
        left = sorted(moves)
        causes = chain([CutReason.STALL], repeat(CutReason.SWITCH))
        timers: list[asyncio.TimerHandle] = []

        def on_turn(turn: Turn) -> Any:
            turn.is_streamed = not moves_s
            move = partial(self._move, turn, causes)
            loop = asyncio.get_running_loop()
            timers.extend(loop.call_later(at_s, move) for at_s in moves_s)

            def moved() -> None:
                if left and len(turn.token_ids) >= left[0] and not turn.ended:
                    left.pop(0)
                    move()

            return moved

        turn, refused = await self.scheduler.turns[JOB].serve(
            request, trajectory=TrajectoryId(name), on_turn=on_turn
        )
        for timer in timers:
            timer.cancel()
        if refused is not None:
            raise RuntimeError(f"{name}: {refused.reason}")
        return turn

    async def publish(self, store: str) -> None:
        published = VersionPublished(job=JOB, store=store, version=WeightVersion(1))
        await self.scheduler.versions.publish(published)

    @property
    def counters(self) -> TurnCounters:
        return self.scheduler.ledgers[JOB].counters

    async def text(self, token_ids: list[int]) -> str:
        body = {"tokens": token_ids}
        async with self._session.post(f"{self._urls[0]}/detokenize", json=body) as reply:
            return str((await reply.json())["prompt"])

    def _move(self, turn: Turn, causes: Iterator[CutReason]) -> None:
        for member in self.scheduler.fleet.members.values():
            for running in member.running:
                if isinstance(running, RunningAttempt) and running.turn is turn:
                    running.cut(next(causes))


@asynccontextmanager
async def cluster(ports: list[int], *, adapter: str | None = None) -> AsyncIterator[Cluster]:
    """`adapter`: the job's store holds LoRA adapters, served by this name."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    settings = GatewaySettings.model_validate(
        {
            "engines": [{"id": f"e{i}", "url": url} for i, url in enumerate(urls)],
            "jobs": [{"id": JOB, "adapter": adapter}],
        }
    )
    async with aiohttp.ClientSession() as session:
        scheduler = Scheduler(settings, MonotonicClock(), SchedulerState(None), session)
        await scheduler.start()
        try:
            yield Cluster(scheduler, session, urls)
        finally:
            await scheduler.close()
