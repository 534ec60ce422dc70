"""Rollouts on the guest without a scheduler: a lease of its own, and as many turns as fit.

Closed loop: every turn that ends is followed by the next, so that the guest always has work and its
speed is what the gate leaves of it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import aiohttp

from benchmarks.testbed.hardware import RolloutLoad
from benchmarks.testbed.held_lease import HeldLease
from benchmarks.testbed.slot import GUEST
from examples.grpo.vocabulary import VOCABULARY_SIZE
from harvester.contracts.wire.leases import EPOCH_HEADER

_RETRY_S = 0.05


@dataclass(slots=True)
class Rollouts:
    session: aiohttp.ClientSession
    url: str
    lease: HeldLease
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
