"""How fast the guest's KV comes back when its budget falls, idle beside and under a crowd.

Timed by the writers' own stamps: from the grant with the smaller budget to the guest's page that
says that its memory is back. Half of the trials begin while production is crowded: two dozen
requests at once, so that it has work for every moment of its core. No agent lifts the guest, as
with the shipped units: one without time until its deadline is killed, counted and started again.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.coserve.arms import BARE
from benchmarks.coserve.reclaim import percentile
from benchmarks.coserve.rounds import Runner
from benchmarks.testbed.slot import GUEST, url
from benchmarks.testbed.trace import Arrival
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Grant, Guest, PageReader

KEPT_TOKENS = 1024
"""Less than the rollouts hold, so that some of them have to end."""
# A guest that is killed again and again would be quarantined, and nothing more be measured.
_ROOMY: dict[str, Any] = {**BARE, "quarantine_losses": 1_000_000}
_SHRUNK: dict[str, Any] = {**_ROOMY, "kv_budget_tokens": KEPT_TOKENS}
_REFILL_S = 1.5
_CROWD = 24
_CROWDED_AFTER_S = 0.3
_POLL_S = 0.001
_GIVEN_UP_S = 60.0
"""Also a killed guest needs time on its core to end, and behind production it waits for that."""
_MISSED = ("harvester_kv_reclaims_total", {"outcome": "missed"})
_KILLED = ("harvester_guest_actions_total", {"action": "kill", "outcome": "done"})


@dataclass(slots=True)
class Shrinks:
    runner: Runner
    grant: PageReader[Grant]
    guest: PageReader[Guest]
    session: aiohttp.ClientSession
    idle_ms: list[float] = field(default_factory=list)
    crowded_ms: list[float] = field(default_factory=list)
    ended: int = 0
    """Trials in which the guest ended, by the agent's hand or its own."""

    async def run(self, trials: int, arrivals: Sequence[Arrival]) -> dict[str, Any]:
        """`trials` of each kind. Raises ConfigError where the guest keeps its memory."""
        missed, killed = await self._counts()
        self.runner.policy(_ROOMY)
        self.runner.slot.parts.may_end.add(GUEST)
        async with self.runner.lease.holding(), self.runner.rollouts.running():
            for turn in range(trials):
                await self._trial(self.idle_ms)
                await self._revived()
                async with self._crowd(arrivals, turn):
                    await self._trial(self.crowded_ms)
                await self._revived()
        self.runner.slot.parts.may_end.remove(GUEST)
        missed_now, killed_now = await self._counts()
        return {
            "kv_p99_ms": percentile(self.idle_ms + self.crowded_ms, 99),
            "kv_idle_p50_ms": percentile(self.idle_ms, 50),
            "kv_crowded_p50_ms": percentile(self.crowded_ms, 50),
            "kv_crowded_max_ms": max(self.crowded_ms, default=None),
            "kv_shrinks": len(self.idle_ms) + len(self.crowded_ms),
            "deadline_missed": missed_now - missed,
            "guests_killed": killed_now - killed,
            "guests_ended": self.ended,
        }

    async def _trial(self, times_ms: list[float]) -> None:
        """A guest that ends gives its memory back, later than its deadline: it has no time."""
        self.runner.policy(_SHRUNK)
        try:
            async with asyncio.timeout(_GIVEN_UP_S):
                due_ns = await self._requested()
                back_ns = await self._returned()
        except TimeoutError as error:
            raise ConfigError("the guest does not return its KV") from error
        self.runner.policy(_ROOMY)
        if back_ns is None:
            self.ended += 1
            return
        times_ms.append((back_ns - due_ns) * 1e-6)
        await asyncio.sleep(_REFILL_S)

    async def _revived(self) -> None:
        """A guest that has ended is started again, and has requests again."""
        slot = self.runner.slot
        child = slot.parts.running[GUEST]
        if child.process.poll() is None:
            return
        await asyncio.to_thread(slot.parts.processes.kill, child)
        slot.start_guest()
        await slot.parts.answers(GUEST, url(slot.ports.guest), lambda _: None)
        slot.bind()
        await asyncio.sleep(_REFILL_S)

    async def _requested(self) -> int:
        while True:
            reading = self.grant.read()
            if reading.record is not None and reading.record.kv_budget_tokens == KEPT_TOKENS:
                return reading.stamp_ns
            await asyncio.sleep(_POLL_S)

    async def _returned(self) -> int | None:
        """Time of the guest's page that says so; None if the guest ended instead."""
        child = self.runner.slot.parts.running[GUEST]
        while child.process.poll() is None:
            reading = self.guest.read()
            guest = reading.record
            if (
                guest is not None
                and guest.kv_tokens_total - guest.kv_tokens_withheld <= KEPT_TOKENS
            ):
                return reading.stamp_ns
            await asyncio.sleep(_POLL_S)
        return None

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

    async def _counts(self) -> tuple[int, int]:
        """Missed deadlines and killed guests, as the agent counts them."""
        address = url(self.runner.slot.ports.agent)
        async with self.session.get(f"{address}/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
        samples = [sample for family in families for sample in family.samples]

        def total(name: str, labels: dict[str, str]) -> int:
            found = (
                s.value for s in samples if s.name == name and labels.items() <= s.labels.items()
            )
            return int(sum(found))

        return total(*_MISSED), total(*_KILLED)
