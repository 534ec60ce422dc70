"""A lease on a slot's guest for a benchmark that runs no gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from benchmarks.testbed.slot import SLOT
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.ids import JobId, SlotId, TenantId
from harvester.contracts.wire.leases import LeaseGranted, LeaseRequest
from scheduler.gateway.capacity.agent_client import AgentClient

_DURATION_S = 10.0
_RENEW_S = 2.0
_RETRY_S = 0.05
_TAKE_S = 60.0
"""The agent may have to learn production's step times first."""


@dataclass(slots=True)
class HeldLease:
    """Lease held while its context lasts; renewed if the agent ended it."""

    agent: AgentClient
    held: LeaseGranted | None = None
    refusal: str = ""
    """Reason of the agent's last refusal."""
    _requests: int = 0

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Raises ConfigError if the agent grants no lease within a minute."""
        try:
            async with asyncio.timeout(_TAKE_S):
                await self._take()
        except TimeoutError as error:
            reason = self.refusal or "it does not answer"
            message = f"the agent granted no lease within {_TAKE_S:.0f} s: {reason}"
            raise ConfigError(message) from error
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
            self._requests += 1
            request = LeaseRequest(
                request_id=f"coserve-{id(self)}-{self._requests}",
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
