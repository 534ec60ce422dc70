"""Runs the arms in alternating blocks: production's replay, training steps and the watch.

Every block k replays the same excerpt, whatever its arm. A block of serving alone lasts a given
time; a block with a job lasts a given number of training steps, so that both jobs do equal work.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from benchmarks.testbed.excerpt import Excerpt
from benchmarks.testbed.gateway_admin import GatewayAdmin
from benchmarks.testbed.production import ProductionClient
from benchmarks.testbed.slot import GUEST
from examples.demo.records import ArmBlock, DemoArm, EngineGap, Record, TrainingStep
from examples.demo.stack import JOBS, Stack
from examples.demo.trainer_link import TrainerLink
from examples.demo.watch import SlotWatch
from examples.grpo.events import StepDone
from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError

WARM_UP_BLOCK = -1
_LEASE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """Number of rounds, and length of each block."""

    rounds: int
    serving_s: float
    steps: int

    def within(self, seconds: float, *, step_s: float) -> "BlockPlan":
        """Limits the rounds to those that fit into `seconds` with steps of `step_s`, and the steps
        of a single round that does not; at least as many as a gain of reward is made of."""
        round_s = self.serving_s + len(JOBS) * self.steps * step_s
        rounds = max(1, min(self.rounds, int(seconds / round_s)))
        if rounds > 1 or round_s <= seconds:
            return replace(self, rounds=rounds)
        steps = int((seconds - self.serving_s) / (len(JOBS) * step_s))
        return replace(self, rounds=1, steps=min(self.steps, max(2, steps)))


def prompts_within(step_s: float, *, found_s: float, found: int, most: int) -> int:
    """Prompts of a step that takes about `step_s` where one of `found` prompts took `found_s`; at
    least as many as those."""
    return min(most, max(found, int(found * step_s / found_s)))


def another_fits(rounds_s: Sequence[float], *, left_s: float) -> bool:
    """Whether a further round fits, by those measured so far; the first is always run."""
    return not rounds_s or max(rounds_s) <= left_s


@dataclass(slots=True, kw_only=True)
class BlockRunner:
    stack: Stack
    gateway: GatewayAdmin
    client: ProductionClient
    trainers: dict[DemoArm, TrainerLink]
    watch: SlotWatch
    clock: Clock
    record: Callable[[Record], None]
    on_progress: Callable[[str], None]
    prompts: int
    """Prompts of each training step."""

    async def run(self, arm: DemoArm, index: int, excerpt: Excerpt, plan: BlockPlan) -> None:
        """One measured block."""
        async with self.replaying(arm, index, excerpt):
            if arm is DemoArm.SERVING_ONLY:
                await asyncio.sleep(plan.serving_s)
            else:
                for _ in range(plan.steps):
                    await self.step(arm, index)

    async def serve(self, arm: DemoArm) -> None:
        """Prepare an arm: its job on every engine, and no lease left where it does not harvest.

        A harvesting job takes its lease when its turns queue, inside its first step.
        """
        harvesting = arm is DemoArm.HARVEST
        if arm in JOBS:
            await self.gateway.activate(JOBS[arm])
        await self.gateway.harvesting(JOBS[DemoArm.HARVEST], enabled=harvesting)
        if not harvesting and not await self.gateway.guest_gone(GUEST, timeout_s=_LEASE_S):
            raise ConfigError("the guest still serves a job that gave its lease back")

    async def step(self, arm: DemoArm, index: int) -> float:
        """Does one training step; returns its duration in s."""
        done = await self.trainers[arm].step(self.prompts)
        self.record(training_step(done, arm, index))
        return done.step_s

    @asynccontextmanager
    async def replaying(self, arm: DemoArm, index: int, excerpt: Excerpt) -> AsyncIterator[None]:
        """Production's replay around a block; requests that were sent are waited for."""
        await self.serve(arm)
        self.watch.arm, self.watch.block = arm, index
        start_s = self.clock.now()
        busy_s = self.watch.pulse().busy_s_total
        stopped = asyncio.Event()
        replay = asyncio.ensure_future(
            self.client.replay(
                excerpt.endless(), arm=arm, block=index, start_s=start_s, stopped=stopped
            )
        )
        try:
            yield
            end_s = self.clock.now()
            busy_s = self.watch.pulse().busy_s_total - busy_s
            stopped.set()
            await replay
        finally:
            replay.cancel()
            with suppress(asyncio.CancelledError):
                await replay
        self.record(
            ArmBlock(
                arm=arm,
                index=index,
                start_s=start_s,
                end_s=end_s,
                production_busy_share=busy_s / (end_s - start_s),
            )
        )


def training_step(done: StepDone, arm: DemoArm, block: int) -> TrainingStep:
    return TrainingStep(
        arm=arm,
        block=block,
        step=done.step,
        end_s=done.end_s,
        step_s=done.step_s,
        rollout_s=done.rollout_s,
        train_s=done.train_s,
        publish_s=done.publish_s,
        switch_s=done.switch_s,
        reward_mean=done.reward_mean,
        reward_se=done.reward_se,
        rollout_tokens=done.rollout_tokens,
        tokens_by_engine=done.tokens_by_engine,
        gaps=tuple(
            EngineGap(engine=engine, sum_abs=sum_abs, tokens=tokens)
            for engine, (sum_abs, tokens) in sorted(done.logprob_gap.items())
        ),
        stale_tokens=done.stale_tokens,
        started=done.trajectories.started,
        completed=done.trajectories.completed,
        lost=done.trajectories.lost,
        duplicated=done.trajectories.duplicated,
        version=done.version,
        bytes_sent=done.bytes_sent,
        bytes_dense=done.bytes_dense,
    )
