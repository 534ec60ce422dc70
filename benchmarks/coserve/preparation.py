"""Before the rounds: both engines learn their step times, load and SLO are fixed."""

import asyncio
from dataclasses import dataclass, replace

from benchmarks.coserve import goals
from benchmarks.coserve.arms import ESSENTIAL, SETTINGS, Arm
from benchmarks.coserve.round_log import RoundLog
from benchmarks.coserve.rounds import Runner
from benchmarks.coserve.run_length import RunLength
from benchmarks.testbed.calibration import MeasuredReplay
from benchmarks.testbed.excerpt import Excerpt
from benchmarks.testbed.load import REQUESTS_MIN, Aim, Load
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.slo import ServiceLevel, choose_slo
from harvester.contracts.errors import ConfigError
from harvester.policy.settings import SlotSettings

_PULSE_S = 1.5
_LEARNING_REPLAYS_MAX = 8


@dataclass(slots=True)
class Preparation:
    runner: Runner
    log: RoundLog
    length: RunLength
    load: Load
    """The load of the rounds, once they are prepared; the one to begin with before that."""

    async def run(self) -> tuple[Excerpt, ...]:
        """The excerpts of the rounds, once both engines have learned their steps.

        Load and SLO are fixed here, and by the first of several pieces for all of them.
        """
        runner, preparation_s = self.runner, self.length.preparation_s
        plan = self.log.plan
        if plan is not None:
            self.load = replace(self.load, sizes=plan.sizes, rate=plan.rate)
        await self._learned(self.load.excerpts(preparation_s, count=1)[0].evenly())
        if plan is None:
            self._aim(())
        await runner.instruct(SETTINGS[Arm.ROSEMUX])
        async with runner.lease.holding(), runner.rollouts.running():
            await asyncio.sleep(preparation_s)
        await runner.quiet()
        if plan is None:
            self._aim((await self._replayed(self.load.excerpts(preparation_s, count=1)[0]),))
            # The SLO is of the load of the rounds.
            await self._replayed(self.load.excerpts(2 * preparation_s, count=1)[0])
        else:
            runner.level = plan.level
        if self.log.settings.slo_ms is not None:
            ttft_ms, itl_ms = self.log.settings.slo_ms
            runner.level = ServiceLevel(ttft_s=ttft_ms * 1e-3, itl_s=itl_ms * 1e-3)
        excerpts = self.load.excerpts(self.length.slice_s, count=self.log.settings.rounds)
        if runner.slot.ports.stock is not None:
            await self._warm_up_stock(excerpts[0])
        return excerpts

    async def _learned(self, excerpt: Excerpt) -> None:
        """Replays the excerpt until production's step times are known: a slow engine's first
        requests wait for each other, and show few of them. Raises ConfigError."""
        least = SlotSettings().model_samples_min
        for _ in range(_LEARNING_REPLAYS_MAX):
            await self._replayed(excerpt)
            if self.runner.pulse().model_samples >= least:
                return
        learned = self.runner.pulse().model_samples
        raise ConfigError(f"{_LEARNING_REPLAYS_MAX} replays taught {learned} of {least} steps")

    async def _warm_up_stock(self, excerpt: Excerpt) -> None:
        """An engine's first requests are no measurement."""
        runner = self.runner
        client, _ = runner.served(Arm.STOCK)
        runner.slot.show_stock(alone=True)
        start_s = runner.clock.now()
        await replace(client, record=lambda _: None).replay(
            excerpt.arrivals, arm=Arm.STOCK, block=-1, start_s=start_s
        )
        runner.slot.show_stock(alone=False)

    async def _replayed(self, excerpt: Excerpt) -> MeasuredReplay:
        runner = self.runner
        seen: list[ProductionRequest] = []
        start_s, busy_s = runner.clock.now(), runner.pulse().busy_s_total
        await replace(runner.client, record=seen.append).replay(
            excerpt.arrivals, arm=Arm.ALONE, block=-1, start_s=start_s
        )
        await asyncio.sleep(max(0.0, start_s + excerpt.duration_s - runner.clock.now()) + _PULSE_S)
        seconds = runner.clock.now() - start_s
        runner.level = choose_slo(seen).level
        busy_s = runner.pulse().busy_s_total - busy_s
        return MeasuredReplay(arrivals=excerpt.arrivals, seconds=seconds, busy_s=busy_s)

    def _aim(self, replays: tuple[MeasuredReplay, ...]) -> None:
        aim = Aim(
            scales=self.runner.slot.hardware.scales,
            slice_s=self.length.slice_s,
            rounds=self.log.settings.rounds,
            step_tokens=self.runner.slot.hardware.step_tokens,
            # A verdict on a goal needs more of them.
            requests_min=goals.REQUESTS_MIN
            if set(self.log.settings.arms) <= set(ESSENTIAL)
            else REQUESTS_MIN,
            busy_share=self.log.settings.busy_share,
        )
        self.load = aim.load(self.load, self.runner.pulse().model, replays=replays)
