"""One slice after another: the arms in turn, the same requests in each of a round."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from benchmarks.coserve.arms import IN_ROUNDS, Arm, Setting
from benchmarks.coserve.blocking import StepWatch, blocking_histogram
from benchmarks.coserve.rollouts import Rollouts
from benchmarks.coserve.spinner import awake
from benchmarks.testbed.core_time import account, used
from benchmarks.testbed.excerpt import Excerpt
from benchmarks.testbed.held_lease import HeldLease
from benchmarks.testbed.machine_speed import loop_s, slowness
from benchmarks.testbed.production import ProductionClient
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.serving_figures import idle_s
from benchmarks.testbed.slo import ServiceLevel
from benchmarks.testbed.slot import GUEST, PRODUCTION, STOCK, ServingSlot, url
from coserve.guest.isolation import NO_ISOLATION
from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Guest, Pulse

# Time after which the load of the last arm has ended.
_SETTLE_S = 1.0
_UNDER_WAY_STEPS = 5
_UNDER_WAY_S = 10.0
"""A guest that a guard holds back takes no step; its slice is measured all the same."""
_QUIET_S = 20.0
_POLL_S = 0.1


class ArmSlice(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one arm in one round."""

    arm: Arm
    round: int
    seconds: float
    guest_tokens: int
    """Prefilled and generated."""
    guest_steps: int
    production_busy_s: float | None
    """Busy time by production's steps, in s; None for the stock engine, which does not say."""
    production_core_s: float
    """Processor time of its engine and its front end; on a GPU, that of its steps."""
    idle_s: float
    """Time in which production had nothing in flight, in s, as its client saw it."""
    guest_core_s: float | None
    """Core time of the guest, in s; None on a GPU, which does not report it."""
    step_work_s: float
    """CPU time of RoseMux's own work in the guest's steps, in s."""
    steps_met: dict[int, int] = {}
    """Requests by the number of guest steps that each met before its first token."""
    steps_missed: int = 0
    """Guest steps that ended between two looks, and are in no count."""
    loops_s: tuple[float, ...] = ()
    """Times of a fixed loop on production's core before and after the arm, in s; empty on a GPU."""


def slower_by_round(slices: Sequence[ArmSlice], above: Arm, below: Arm) -> dict[int, float]:
    """Logarithm of how much slower the machine was in `above`'s slice than in `below`'s.

    Without rounds in which it was not measured.
    """
    found = {(each.round, each.arm): slowness(each.loops_s) for each in slices}
    pairs = {turn: (found.get((turn, above)), found.get((turn, below))) for turn, _ in found}
    return {
        turn: one - other
        for turn, (one, other) in pairs.items()
        if one is not None and other is not None
    }


@dataclass(slots=True, kw_only=True)
class Runner:
    slot: ServingSlot
    client: ProductionClient
    rollouts: Rollouts
    lease: HeldLease
    clock: Clock
    pulse: Callable[[], Pulse]
    guest: Callable[[], Guest]
    level: ServiceLevel
    """Production's SLO as of now."""
    requests: list[ProductionRequest]

    async def run(self, arm: Arm, number: int, excerpt: Excerpt) -> ArmSlice:
        setting = IN_ROUNDS[arm]
        before = await self._loops_s()
        async with AsyncExitStack() as around:
            await around.enter_async_context(self.arranged(setting))
            if arm is Arm.AWAKE:
                await around.enter_async_context(awake(self.slot))
            if setting.rollouts:
                await self._under_way()
            if arm is Arm.STOCK:
                self.slot.show_stock(alone=True)
                around.callback(self.slot.show_stock, alone=False)
            await asyncio.sleep(_SETTLE_S)
            done = await self._measured(arm, number, excerpt)
        return msgspec.structs.replace(done, loops_s=(*before, *await self._loops_s()))

    async def _loops_s(self) -> tuple[float, ...]:
        """The machine's speed, while no engine has work."""
        core = self.slot.hardware.core(self.slot.core)
        return () if core is None else (await loop_s(core),)

    @asynccontextmanager
    async def arranged(self, setting: Setting) -> AsyncIterator[None]:
        """The arm's rule in force and its rollouts under way; afterwards the guest has ended."""
        await self.instruct(setting)
        async with AsyncExitStack() as rollouts:
            if setting.rollouts:
                await rollouts.enter_async_context(self.lease.holding())
                await rollouts.enter_async_context(self.rollouts.running())
            yield
        await self.quiet()

    async def instruct(self, setting: Setting) -> None:
        self.slot.isolate(self.slot.isolation if setting.isolated else NO_ISOLATION)
        if setting.shipped != self.slot.shipped:
            policy = self.slot.policy if setting.shipped else self.slot.experiment
            await self.slot.replace_agent(policy(self.level), shipped=setting.shipped)
        if not setting.shipped:
            self.policy(setting.policy)

    async def _under_way(self) -> None:
        """Waits for the guest's first steps; a guard that holds it back ends the wait."""
        steps = self.guest().steps_finished
        with suppress(TimeoutError):
            async with asyncio.timeout(_UNDER_WAY_S):
                while self.guest().steps_finished < steps + _UNDER_WAY_STEPS:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)

    def policy(self, changes: dict[str, Any]) -> None:
        """Settings over those of an experiment; the guest's isolation stays as it is."""
        own = self.slot.experiment(self.level)
        merged = {
            key: {**own[key], **value} if isinstance(value, dict) and key in own else value
            for key, value in changes.items()
        }
        self.slot.instruct(own | merged)

    async def quiet(self) -> None:
        """Waits until the guest holds and steps nothing. Raises ConfigError if it goes on."""
        until_s, steps = self.clock.now() + _QUIET_S, -1
        while (guest := self.guest()).running or guest.steps_finished != steps:
            if self.clock.now() > until_s:
                raise ConfigError(f"the guest still runs {guest.running} requests")
            steps = guest.steps_finished
            await asyncio.sleep(_POLL_S)

    async def _measured(self, arm: Arm, number: int, excerpt: Excerpt) -> ArmSlice:
        start_s, guest, busy_s = self.clock.now(), self.guest(), self.pulse().busy_s_total
        client, production = self.served(arm)
        seen: list[ProductionRequest] = []
        trees = [self.slot.parts.running[name].tree() for name in (production, GUEST)]
        ran = [account(tree) for tree in trees]
        stopped = asyncio.Event()
        arrivals = excerpt.arrivals if IN_ROUNDS[arm].production else ()
        steps = StepWatch(self.guest)
        watching = asyncio.ensure_future(steps.run())
        replay = asyncio.ensure_future(
            replace(client, record=seen.append).replay(
                arrivals, arm=arm, block=number, start_s=start_s, stopped=stopped
            )
        )
        try:
            await asyncio.sleep(start_s + excerpt.duration_s - self.clock.now())
            end_s, after = self.clock.now(), self.guest()
            busy_s = self.pulse().busy_s_total - busy_s
            production_s, guest_s = (
                sum(used(before, account(tree)).values())
                for before, tree in zip(ran, trees, strict=True)
            )
            stopped.set()
            await replay
        finally:
            replay.cancel()
            watching.cancel()
        if after.steps_finished < guest.steps_finished:
            raise ConfigError("the guest began anew within a slice")
        self.requests += seen
        shares_core = self.slot.hardware.shares_core
        return ArmSlice(
            arm=arm,
            round=number,
            seconds=end_s - start_s,
            guest_tokens=after.tokens_total - guest.tokens_total,
            guest_steps=after.steps_finished - guest.steps_finished,
            production_busy_s=None if arm is Arm.STOCK else busy_s,
            production_core_s=production_s if shares_core else busy_s,
            idle_s=idle_s(seen, start_s=start_s, end_s=end_s),
            guest_core_s=guest_s if shares_core else None,
            step_work_s=after.step_work_s_total - guest.step_work_s_total,
            steps_met=blocking_histogram(seen, steps.steps_s) if IN_ROUNDS[arm].rollouts else {},
            steps_missed=steps.missed,
        )

    def served(self, arm: Arm) -> tuple[ProductionClient, str]:
        """The client of the arm's production engine, and that engine's name."""
        port = self.slot.ports.stock
        if arm is not Arm.STOCK or port is None:
            return self.client, PRODUCTION
        return replace(self.client, url=url(port), model=STOCK), STOCK
