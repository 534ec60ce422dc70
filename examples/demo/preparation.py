"""Unmeasured runs before the first block: they find the replay's speed and production's SLO.

a short replay of production alone, while the trainers start    ->  a first speed and SLO
a step of the harvesting job, production idle                   ->  the guest learns its own times
a step of the fixed job beside production                       ->  how long a step takes here,
                                                                    what the law must know
a longer replay of production alone                             ->  the blocks' speed and SLO
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from benchmarks.testbed.calibration import Replayed, measured_ratio, rate_for
from benchmarks.testbed.production import ProductionClient
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.slo import choose_slo
from benchmarks.testbed.trace import Trace
from benchmarks.testbed.window import TokenScale, Window, windows_of
from examples.demo.blocks import WARM_UP_BLOCK, BlockPlan, BlockRunner
from examples.demo.records import Arm
from examples.demo.stack import Stack
from examples.demo.watch import SlotWatch
from harvester.contracts.clock import Clock

TOKEN_SCALE = TokenScale(
    input_scale=0.25, output_scale=0.25, input_max=1024, output_min=2, output_max=128
)
# Slow enough for any machine that can run the demo at all; the replays raise it.
FIRST_RATE = 3.0
_STEP_WINDOW_S = 30.0
# The pulse renews its step times once a second.
_PULSE_S = 1.5


@dataclass(slots=True, kw_only=True)
class Preparation:
    """Call its methods in the order of their definition."""

    stack: Stack
    trace: Trace
    client: ProductionClient
    watch: SlotWatch
    clock: Clock
    rate: float = FIRST_RATE
    """Requests per second: at first a guess, in the end the measured blocks'."""
    _replayed: list[Replayed] = field(default_factory=list)

    async def first_replay(self, seconds: float) -> None:
        """Evenly, so that each request teaches how long it takes, however bursty the trace is.

        Slow, because the engine makes its kernels as it meets new sizes: forgotten later.
        """
        await self._replay_alone(self._window(seconds).evenly())
        self._aim(seconds)
        self._replayed.clear()

    async def harvesting_step(self, runner: BlockRunner) -> None:
        """Beside production a guest that has never run would learn one token at a time."""
        nothing = replace(self._window(_STEP_WINDOW_S), arrivals=())
        async with runner.replaying(Arm.HARVEST, WARM_UP_BLOCK, nothing):
            await runner.step(Arm.HARVEST, WARM_UP_BLOCK)

    async def fixed_step(self, runner: BlockRunner) -> float:
        """Its seconds."""
        window = self._window(_STEP_WINDOW_S)
        async with runner.replaying(Arm.FIXED, WARM_UP_BLOCK, window):
            with self._learning(window):
                return await runner.step(Arm.FIXED, WARM_UP_BLOCK)

    async def last_replay(self, seconds: float, *, blocks: BlockPlan) -> tuple[Window, ...]:
        """The windows for the measured blocks, one for each round."""
        await self._replay_alone(self._window(seconds))
        self._aim(blocks.serving_s, count=blocks.rounds)
        return self._windows(blocks.serving_s, count=blocks.rounds, rate=self.rate)

    async def _replay_alone(self, window: Window) -> None:
        """Its requests stay out of the records; the SLO that they attain is promised."""
        seen: list[ProductionRequest] = []
        quiet = replace(self.client, record=seen.append)
        start_s = self.clock.now()
        with self._learning(window):
            await quiet.replay(
                window.arrivals, arm=Arm.SERVING_ONLY, block=WARM_UP_BLOCK, start_s=start_s
            )
            await asyncio.sleep(max(0.0, start_s + window.duration_s - self.clock.now()))
        await asyncio.sleep(_PULSE_S)
        self.stack.promise(choose_slo(seen).level)

    @contextmanager
    def _learning(self, window: Window) -> Iterator[None]:
        """Notes how busy production was while `window` was replayed, from its beginning."""
        start_s, busy_s = self.clock.now(), self.watch.pulse().busy_s_total
        yield
        seconds = self.clock.now() - start_s
        self._replayed.append(
            Replayed(
                arrivals=window.until(seconds),
                seconds=seconds,
                busy_s=self.watch.pulse().busy_s_total - busy_s,
            )
        )

    def _aim(self, seconds: float, *, count: int = 1) -> None:
        model = self.watch.pulse().model
        self.rate = rate_for(
            lambda rate: self._windows(seconds, count=count, rate=rate),
            model,
            measured_ratio=measured_ratio(self._replayed, model),
        )

    def _window(self, seconds: float) -> Window:
        return self._windows(seconds, count=1, rate=self.rate)[0]

    def _windows(self, seconds: float, *, count: int, rate: float) -> tuple[Window, ...]:
        windows = windows_of(self.trace, count=count, duration_s=seconds, rate=rate)
        return tuple(window.sized(TOKEN_SCALE) for window in windows)
