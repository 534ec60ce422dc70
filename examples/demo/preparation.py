"""Unmeasured runs before the first block: they find the replay's speed and production's SLO.

short replays of production alone, while the trainers start     ->  a first speed and SLO, the
                                                                    step times that lending needs
a small step of the harvesting job, production idle             ->  the guest learns its own times
a small step of the fixed job beside production                 ->  how long a step takes here,
                                                                    what the law must know
a longer replay of production alone                             ->  the blocks' speed and SLO
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from benchmarks.testbed.calibration import MeasuredReplay
from benchmarks.testbed.excerpt import Excerpt
from benchmarks.testbed.hardware import CpuHardware
from benchmarks.testbed.load import Aim, Load
from benchmarks.testbed.production import ProductionClient
from benchmarks.testbed.production_model import STEP_TOKENS
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.slo import choose_slo
from benchmarks.testbed.trace import Trace
from examples.demo.blocks import WARM_UP_BLOCK, BlockPlan, BlockRunner
from examples.demo.records import DemoArm
from examples.demo.stack import Stack
from examples.demo.watch import SlotWatch
from harvester.contracts.clock import Clock
from harvester.policy.settings import SlotSettings

SCALES = CpuHardware.scales
# Slow enough for any machine that can run the demo at all; the replays raise it.
FIRST_RATE = 3.0
# Requests are made smaller until an excerpt has as many: fewer bear no percentile, and teach the
# slot its step times too slowly. A CPU with AVX-512 serves more of the largest.
_REQUESTS_MIN = 40
_STEP_EXCERPT_S = 30.0
PROMPTS = 12
"""Prompts of each unmeasured step: a full step takes a minute on a slow machine."""
_FIRST_REPLAYS_MAX = 4
# The pulse renews its step times once a second.
_PULSE_S = 1.5


@dataclass(slots=True, kw_only=True)
class DemoPreparation:
    """Call its methods in the order of their definition."""

    stack: Stack
    trace: Trace
    client: ProductionClient
    watch: SlotWatch
    clock: Clock
    load: Load = field(init=False)
    """At first a guess, in the end the measured blocks'."""
    _replayed: list[MeasuredReplay] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.load = Load(trace=self.trace, sizes=SCALES[0], rate=FIRST_RATE)

    async def first_replay(self, seconds: float) -> None:
        """Evenly, so that each request teaches how long it takes, however bursty the trace is.

        Again while production's step times are not known: until then nothing is lent, and a slow
        engine makes few steps. Slow, because the engine makes its kernels as it meets new sizes:
        forgotten later.
        """
        for _ in range(_FIRST_REPLAYS_MAX):
            await self._replay_alone(self._excerpt(seconds).evenly())
            if self.watch.pulse().model_samples >= SlotSettings().model_samples_min:
                break
        self._aim(seconds)
        self._replayed.clear()

    async def harvesting_step(self, runner: BlockRunner) -> None:
        """Beside production a guest that has never run would learn one token at a time."""
        nothing = replace(self._excerpt(_STEP_EXCERPT_S), arrivals=())
        async with runner.replaying(DemoArm.HARVEST, WARM_UP_BLOCK, nothing):
            await runner.step(DemoArm.HARVEST, WARM_UP_BLOCK)

    async def fixed_step(self, runner: BlockRunner) -> float:
        """Does one unmeasured step under production's load; returns its duration in s."""
        excerpt = self._excerpt(_STEP_EXCERPT_S)
        async with runner.replaying(DemoArm.FIXED, WARM_UP_BLOCK, excerpt):
            with self._learning(excerpt):
                return await runner.step(DemoArm.FIXED, WARM_UP_BLOCK)

    async def last_replay(self, seconds: float, *, blocks: BlockPlan) -> tuple[Excerpt, ...]:
        """The excerpts for the measured blocks, one for each round."""
        await self._replay_alone(self._excerpt(seconds))
        self._aim(blocks.serving_s, count=blocks.rounds)
        return self.load.excerpts(blocks.serving_s, count=blocks.rounds)

    async def _replay_alone(self, excerpt: Excerpt) -> None:
        """Its requests stay out of the records; the SLO that they attain is promised."""
        seen: list[ProductionRequest] = []
        quiet = replace(self.client, record=seen.append)
        start_s = self.clock.now()
        with self._learning(excerpt):
            await quiet.replay(
                excerpt.arrivals, arm=DemoArm.SERVING_ONLY, block=WARM_UP_BLOCK, start_s=start_s
            )
            await asyncio.sleep(max(0.0, start_s + excerpt.duration_s - self.clock.now()))
        await asyncio.sleep(_PULSE_S)
        self.stack.promise(choose_slo(seen).level)

    @contextmanager
    def _learning(self, excerpt: Excerpt) -> Iterator[None]:
        """Notes how busy production was while `excerpt` was replayed, from its beginning."""
        start_s, busy_s = self.clock.now(), self.watch.pulse().busy_s_total
        yield
        seconds = self.clock.now() - start_s
        self._replayed.append(
            MeasuredReplay(
                arrivals=excerpt.until(seconds),
                seconds=seconds,
                busy_s=self.watch.pulse().busy_s_total - busy_s,
            )
        )

    def _aim(self, seconds: float, *, count: int = 1) -> None:
        aim = Aim(
            scales=SCALES,
            slice_s=seconds,
            rounds=count,
            step_tokens=STEP_TOKENS,
            requests_min=_REQUESTS_MIN * count,
        )
        self.load = aim.load(self.load, self.watch.pulse().model, replays=self._replayed)

    def _excerpt(self, seconds: float) -> Excerpt:
        return self.load.excerpts(seconds, count=1)[0]
