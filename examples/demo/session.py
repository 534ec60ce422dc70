"""One run of the demo from cold engines to its result: what comes after what.

services and engines start  ->  the warm policy is made, trainers publish version 1
preparation: the replay's speed, production's SLO, one unmeasured step of each job
measured blocks, as many rounds as there is time for  ->  result
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.testbed.calibration import TARGET_BUSY_SHARE
from benchmarks.testbed.excerpt import Excerpt, TokenScale, mean_rate
from benchmarks.testbed.gateway_admin import GatewayAdmin
from benchmarks.testbed.interleaving import interleaved
from benchmarks.testbed.parts import run_with_watchdog
from benchmarks.testbed.production import ProductionClient, RandomPrompts, production_session
from benchmarks.testbed.production_model import PROMPT_IDS
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.slo import FIRST_LEVEL, ServiceLevel, choose_slo
from benchmarks.testbed.slot import PRODUCTION
from benchmarks.testbed.trace import Trace
from examples.demo.blocks import BlockPlan, BlockRunner, another_fits, prompts_within
from examples.demo.preparation import PROMPTS, DemoPreparation
from examples.demo.records import DemoArm, Record
from examples.demo.stack import JOBS, Stack
from examples.demo.trainer_link import TrainerLink
from examples.demo.watch import SlotWatch
from examples.demo.weights_audit import WeightsAudit
from examples.grpo.environment import TaskShape
from harvester.contracts.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    blocks: BlockPlan
    """Upper bound of the rounds; a slow machine gets fewer."""
    step_s: float
    """A training step has so many prompts that it takes about this long, and never more than the
    job's tasks have."""
    first_replay_s: float
    last_replay_s: float
    within_s: float
    """Time limit from the command to the end of the last block, in s."""


class Recorder:
    """Keeps every record and writes it down at once, so that an interrupted run leaves them."""

    def __init__(self, path: Path) -> None:
        self.records: list[Record] = []
        self._file = path.open("wb")
        self._encoder = msgspec.json.Encoder()

    def __call__(self, record: Record) -> None:
        self.records.append(record)
        self._file.write(self._encoder.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Data of a run for the result, besides its records."""

    excerpts: tuple[Excerpt, ...]
    """One for each round."""
    sizes: TokenScale
    """Scale of their requests."""
    prompts: int
    """Prompts of each training step."""
    gateway: dict[str, Any]
    hash_mismatches: int | None
    first_harvested_token_s: float | None
    """CLOCK_MONOTONIC."""


@dataclass(slots=True, kw_only=True)
class Session:
    stack: Stack
    trace: Trace
    plan: SessionPlan
    recorder: Recorder
    clock: Clock
    on_progress: Callable[[str], None]
    progress: Callable[[Record], None]
    seed: int
    started_s: float
    """Start of the command."""
    watch: SlotWatch = field(init=False)

    async def run(self) -> Outcome:
        """Raises RoseMuxError when a part fails; cancelled, it leaves its records."""
        self.stack.start_engines()
        self.stack.start_services(FIRST_LEVEL)
        return await run_with_watchdog(self.stack.parts.one_dies(), self._run())

    async def _run(self) -> Outcome:
        await asyncio.gather(
            self.stack.engines_ready(self.on_progress), self.stack.services_ready(self.on_progress)
        )
        self.watch = SlotWatch(
            self.stack.slot.pages, PRODUCTION, clock=self.clock, record=self.recorder
        )
        watching = asyncio.ensure_future(self.watch.run())
        try:
            async with production_session() as session:
                return await self._measure(session)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _measure(self, session: aiohttp.ClientSession) -> Outcome:
        gateway = GatewayAdmin(session, self.stack.gateway_url)
        client = ProductionClient(
            session=session,
            url=self.stack.production_url,
            model=PRODUCTION,
            prompts=RandomPrompts(seed=self.seed, first_id=PROMPT_IDS[0], last_id=PROMPT_IDS[1]),
            clock=self.clock,
            record=self._record,
        )
        preparation = DemoPreparation(
            stack=self.stack, trace=self.trace, client=client, watch=self.watch, clock=self.clock
        )
        trainers, _ = await asyncio.gather(
            self._trainers(), preparation.first_replay(self.plan.first_replay_s)
        )
        runner = BlockRunner(
            stack=self.stack,
            gateway=gateway,
            client=client,
            trainers=trainers,
            watch=self.watch,
            clock=self.clock,
            record=self._record,
            on_progress=self.on_progress,
            prompts=PROMPTS,
        )
        await preparation.harvesting_step(runner)
        found_s = await preparation.fixed_step(runner)
        runner.prompts = prompts_within(
            self.plan.step_s, found_s=found_s, found=PROMPTS, most=TaskShape().prompts_per_step
        )
        step_s = found_s * runner.prompts / PROMPTS
        left_s = self.started_s + self.plan.within_s - self.clock.now()
        blocks = self.plan.blocks.within(left_s - self.plan.last_replay_s, step_s=step_s)
        excerpts = await preparation.last_replay(self.plan.last_replay_s, blocks=blocks)
        self.on_progress(
            f"{blocks.rounds} rounds of {mean_rate(excerpts):.1f} requests/s, which should keep "
            f"production busy {TARGET_BUSY_SHARE:.0%} of the time, and of steps of "
            f"{runner.prompts} prompts"
        )
        audit = WeightsAudit(session, self.stack.rollout_urls(), self.stack.paths.weights)
        measured = [excerpt async for excerpt in self._rounds(blocks, excerpts, runner, audit)]
        return Outcome(
            excerpts=tuple(measured),
            sizes=preparation.load.sizes,
            prompts=runner.prompts,
            gateway=await gateway.status(),
            hash_mismatches=audit.hash_mismatches,
            first_harvested_token_s=self.watch.first_guest_token_s,
        )

    async def _rounds(
        self,
        blocks: BlockPlan,
        excerpts: Sequence[Excerpt],
        runner: BlockRunner,
        audit: WeightsAudit,
    ) -> AsyncIterator[Excerpt]:
        """The excerpts that were measured: a step may take longer than that of the preparation."""
        rounds_s: list[float] = []
        for index, excerpt in enumerate(excerpts):
            began_s = self.clock.now()
            if not another_fits(rounds_s, left_s=self.started_s + self.plan.within_s - began_s):
                self.on_progress(f"round {index + 1} is left out: one takes {max(rounds_s):.0f} s")
                return
            for arm, _ in interleaved(tuple(DemoArm), index + 1, first=index):
                self.on_progress(f"round {index + 1}: {arm}")
                await runner.run(arm, index, excerpt, blocks)
                await audit.run()
                level = measured_level(self.recorder.records)
                if arm is DemoArm.SERVING_ONLY and level is not None:
                    self.stack.promise(level)
            rounds_s.append(self.clock.now() - began_s)
            yield excerpt

    def _record(self, record: Record) -> None:
        self.recorder(record)
        self.progress(record)

    async def _trainers(self) -> dict[DemoArm, TrainerLink]:
        """Start both; each is ready once its first version serves on the dedicated engine."""
        await self.stack.warmed_up()
        links = {arm: TrainerLink(self.stack.start_trainer(arm)) for arm in JOBS}
        for arm, link in links.items():
            ready = await link.ready()
            self.on_progress(
                f"job {JOBS[arm]}: {ready.parameters / 1e6:.1f} M parameters published"
            )
        return links


def measured_level(records: Iterable[Record]) -> ServiceLevel | None:
    """The SLO that production alone attains in its measured blocks so far.

    None before its first request: a round of a bursty trace may have none.
    """
    seen = [
        record
        for record in records
        if isinstance(record, ProductionRequest)
        and record.arm is DemoArm.SERVING_ONLY
        and record.block >= 0
    ]
    return choose_slo(seen).level if seen else None
