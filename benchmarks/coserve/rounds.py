"""One slice after another: the arms in turn, the same requests in each of a round."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.coserve.arms import ALONE, IN_ROUNDS, Arm, Setting
from benchmarks.coserve.rollouts import Rollouts
from benchmarks.testbed.core_time import account, used
from benchmarks.testbed.held_lease import HeldLease
from benchmarks.testbed.production import ProductionClient
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.slo import ServiceLevel, choose_slo
from benchmarks.testbed.slot import GUEST, PRODUCTION, ServingSlot
from benchmarks.testbed.window import Window
from coserve.guest.isolation import NO_ISOLATION
from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Guest, Pulse

# Until the guest's steps are under way, and what the last arm left has gone.
_SETTLE_S = 1.0
_QUIET_S = 20.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Measurements of one arm in one round."""

    arm: Arm
    round: int
    seconds: float
    guest_tokens: int
    """Prefilled and generated."""
    production_busy_s: float
    """Busy time by production's steps, in s."""
    production_core_s: float
    """Processor time of its engine and its front end; on a GPU, that of its steps."""
    guest_core_s: float
    """Core time of the guest, in s; NaN on a GPU, which does not report it."""
    decide_s_mean: float


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
    slices: list[Slice] = field(default_factory=list)

    async def run(self, arm: Arm, number: int, window: Window) -> Slice:
        setting = IN_ROUNDS[arm]
        async with self.arranged(setting):
            await asyncio.sleep(_SETTLE_S)
            measured = await self._measured(arm, number, window, serving=setting.production)
        self.slices.append(measured)
        if arm in ALONE:
            seen = [r for r in self.requests if r.arm in ALONE and r.block >= 0]
            if seen:
                self.level = choose_slo(seen).level
        return measured

    @asynccontextmanager
    async def arranged(self, setting: Setting) -> AsyncIterator[None]:
        """The arm's rule in force and its rollouts under way; afterwards the guest has ended."""
        self.instruct(setting)
        async with AsyncExitStack() as rollouts:
            if setting.rollouts:
                await rollouts.enter_async_context(self.lease.holding())
                await rollouts.enter_async_context(self.rollouts.running())
            yield
        await self.quiet()

    def instruct(self, setting: Setting) -> None:
        self.slot.isolate(self.slot.isolation if setting.isolated else NO_ISOLATION)
        self.policy(setting.policy)

    def policy(self, changes: dict[str, Any]) -> None:
        """Policy over the slot's own; the guest's isolation stays as it is."""
        own = self.slot.policy(self.level)
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

    async def _measured(self, arm: Arm, number: int, window: Window, *, serving: bool) -> Slice:
        start_s, guest, busy_s = self.clock.now(), self.guest(), self.pulse().busy_s_total
        trees = [self.slot.parts.running[name].tree() for name in (PRODUCTION, GUEST)]
        ran = [account(tree) for tree in trees]
        stopped = asyncio.Event()
        arrivals = window.arrivals if serving else ()
        replay = asyncio.ensure_future(
            self.client.replay(arrivals, arm=arm, block=number, start_s=start_s, stopped=stopped)
        )
        try:
            await asyncio.sleep(start_s + window.duration_s - self.clock.now())
            end_s, after = self.clock.now(), self.guest()
            busy_s = self.pulse().busy_s_total - busy_s
            production_s, guest_s = (
                sum(used(before, account(tree)).values())
                for before, tree in zip(ran, trees, strict=True)
            )
            if not self.slot.hardware.shares_core:
                production_s, guest_s = busy_s, math.nan
            stopped.set()
            await replay
        finally:
            replay.cancel()
        if after.steps_finished < guest.steps_finished:
            raise ConfigError("the guest began anew within a slice")
        return Slice(
            arm=arm,
            round=number,
            seconds=end_s - start_s,
            guest_tokens=after.tokens_total - guest.tokens_total,
            production_busy_s=busy_s,
            production_core_s=production_s,
            guest_core_s=guest_s,
            decide_s_mean=after.decide_s_mean,
        )
