"""Rollouts on the guest without a scheduler: a lease of its own, and as many turns as fit.

Closed loop: every turn that ends is followed by the next, so that the guest always has work and its
speed is what the gate leaves of it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random

import aiohttp

from benchmarks.testbed.hardware import RolloutLoad
from benchmarks.testbed.slot import GUEST, SLOT
from examples.grpo.vocabulary import VOCABULARY_SIZE
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.ids import JobId, SlotId, TenantId
from harvester.contracts.wire.leases import EPOCH_HEADER, LeaseGranted, LeaseRequest
from scheduler.gateway.leases import AgentClient

_DURATION_S = 10.0
_RENEW_S = 2.0
_RETRY_S = 0.05
_TAKE_S = 60.0
"""The agent may first have to believe production's step times again."""


@dataclass(slots=True)
class Lease:
    """Lease held while its context lasts; renewed if the agent ended it."""

    agent: AgentClient
    held: LeaseGranted | None = None
    refusal: str = ""
    """The agent's last, with its reason."""
    _turn: int = 0

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Raises ConfigError where the agent offers nothing for a minute."""
        try:
            async with asyncio.timeout(_TAKE_S):
                await self._take()
        except TimeoutError as error:
            said = self.refusal or "it does not answer"
            raise ConfigError(f"the agent gave no lease within {_TAKE_S:.0f} s: {said}") from error
        renewing = asyncio.ensure_future(self._renew())
        try:
            yield
        finally:
            renewing.cancel()
            with suppress(asyncio.CancelledError):
                await renewing
            if self.held is not None:
                with suppress(Exhausted):
                    await self.agent.release(self.held.lease)
            self.held = None

    async def _take(self) -> None:
        self.held = None
        while self.held is None:
            self._turn += 1
            request = LeaseRequest(
                request_id=f"coserve-{id(self)}-{self._turn}",
                slot=SlotId(SLOT),
                tenant=TenantId("benchmark"),
                job=JobId("benchmark"),
                duration_s=_DURATION_S,
            )
            with suppress(Exhausted):
                taken = await self.agent.take(request)
                if isinstance(taken, LeaseGranted):
                    self.held = taken
                    return
                self.refusal = taken.reason
            await asyncio.sleep(_RETRY_S)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            assert self.held is not None
            try:
                renewed = await self.agent.renew(
                    self.held.lease, epoch=self.held.epoch, duration_s=_DURATION_S
                )
            except Exhausted:
                continue
            if not isinstance(renewed, LeaseGranted):
                await self._take()


@dataclass(slots=True)
class Rollouts:
    session: aiohttp.ClientSession
    url: str
    lease: Lease
    seed: int
    load: RolloutLoad = field(default_factory=RolloutLoad)
    turns: int = field(default=0)
    """Completed."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        lanes = [asyncio.ensure_future(self._lane(lane)) for lane in range(self.load.concurrency)]
        try:
            yield
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)

    async def _lane(self, lane: int) -> None:
        rng = Random(f"{self.seed}:{lane}:{self.turns}")
        while True:
            held = self.lease.held
            if held is None or not await self._turn(rng, held.epoch):
                await asyncio.sleep(_RETRY_S)

    async def _turn(self, rng: Random, epoch: int) -> bool:
        request = {
            "model": GUEST,
            "prompt": rng.choices(range(VOCABULARY_SIZE), k=self.load.prompt_tokens),
            "max_tokens": self.load.turn_tokens,
            "ignore_eos": True,
            "stream": False,
        }
        try:
            async with self.session.post(
                f"{self.url}/v1/completions",
                data=json.dumps(request),
                headers={"Content-Type": "application/json", EPOCH_HEADER: str(epoch)},
            ) as response:
                await response.read()
                done = response.status == 200
        except (aiohttp.ClientError, OSError):
            return False
        self.turns += done
        return done
