"""How fast the guest's KV comes back when its budget falls, idle beside and under a crowd.

Timed by the writers' own stamps: from the grant with the smaller budget to the guest's page that
says that its memory is back. Half of the trials begin while production is crowded: two dozen
requests at once, so that it has work for every moment of its core.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from benchmarks.coserve.arms import BARE
from benchmarks.coserve.reclaim import percentile
from benchmarks.coserve.rounds import Runner
from benchmarks.testbed.slot import url
from benchmarks.testbed.trace import Arrival
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Grant, Guest, PageReader

KEPT_TOKENS = 1024
"""Less than the rollouts hold, so that some of them have to end."""
_ROOMY: dict[str, Any] = BARE
_SHRUNK: dict[str, Any] = {**BARE, "kv_budget_tokens": KEPT_TOKENS}
_REFILL_S = 1.5
_CROWD = 24
_CROWDED_AFTER_S = 0.3
_POLL_S = 0.001
_GIVEN_UP_S = 10.0
_MISSED = re.compile(r'harvester_kv_reclaims_total\{.*outcome="missed".*\} ([0-9.e+]+)')


@dataclass(slots=True)
class Shrinks:
    runner: Runner
    grant: PageReader[Grant]
    guest: PageReader[Guest]
    session: aiohttp.ClientSession
    idle_ms: list[float] = field(default_factory=list)
    crowded_ms: list[float] = field(default_factory=list)

    async def run(self, trials: int, arrivals: Sequence[Arrival]) -> dict[str, Any]:
        """`trials` of each kind. Raises ConfigError where the guest keeps its memory."""
        missed = await self._missed()
        self.runner.policy(_ROOMY)
        async with self.runner.lease.holding(), self.runner.rollouts.running():
            for turn in range(trials):
                self.idle_ms.append(await self._trial())
                async with self._crowd(arrivals, turn):
                    self.crowded_ms.append(await self._trial())
        missed = await self._missed() - missed
        return {
            "kv_p99_ms": percentile(self.idle_ms + self.crowded_ms, 99),
            "kv_idle_p50_ms": percentile(self.idle_ms, 50),
            "kv_crowded_p50_ms": percentile(self.crowded_ms, 50),
            "kv_crowded_max_ms": max(self.crowded_ms, default=None),
            "kv_shrinks": len(self.idle_ms) + len(self.crowded_ms),
            "deadline_missed": missed,
            "guests_killed": missed,
        }

    async def _trial(self) -> float:
        self.runner.policy(_SHRUNK)
        try:
            async with asyncio.timeout(_GIVEN_UP_S):
                due_ns = await self._requested()
                back_ns = await self._returned()
        except TimeoutError as error:
            raise ConfigError("the guest does not return its KV") from error
        self.runner.policy(_ROOMY)
        await asyncio.sleep(_REFILL_S)
        return (back_ns - due_ns) * 1e-6

    async def _requested(self) -> int:
        while True:
            reading = self.grant.read()
            if reading.record is not None and reading.record.kv_budget_tokens == KEPT_TOKENS:
                return reading.stamp_ns
            await asyncio.sleep(_POLL_S)

    async def _returned(self) -> int:
        while True:
            reading = self.guest.read()
            guest = reading.record
            if (
                guest is not None
                and guest.kv_tokens_total - guest.kv_tokens_withheld <= KEPT_TOKENS
            ):
                return reading.stamp_ns
            await asyncio.sleep(_POLL_S)

    @asynccontextmanager
    async def _crowd(self, arrivals: Sequence[Arrival], turn: int) -> AsyncIterator[None]:
        crowd = [replace(arrival, t_s=0.0) for arrival in arrivals[:_CROWD]]
        client, start_s = self.runner.client, self.runner.clock.now()
        replay = asyncio.ensure_future(
            client.replay(crowd, arm="crowd", block=turn, start_s=start_s)
        )
        await asyncio.sleep(_CROWDED_AFTER_S)
        try:
            yield
        finally:
            await replay

    async def _missed(self) -> int:
        address = url(self.runner.slot.ports.agent)
        async with self.session.get(f"{address}/metrics") as response:
            found = _MISSED.search(await response.text())
        return int(float(found[1])) if found else 0
