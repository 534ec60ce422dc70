"""The phase service in an event loop: calls as bytes, entries held open until their permit exists.

The socket and the Ray actor share it.
"""

import asyncio

import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.ids import TenantId
from harvester.platform.tenants import Tenants
from scheduler.rollmux.control.job_owners import JobOwners
from scheduler.rollmux.control.phase_service import TICK_S, PhaseService
from scheduler.rollmux.control.wire import WAIT_MAX_S, Reply, Waiting, decoded_call
from scheduler.rollmux.permits.events import Enter


class AsyncPhaseApi:
    def __init__(self, service: PhaseService, clock: Clock, tenants: Tenants | None = None) -> None:
        self.service = service
        self.owners = JobOwners(service, tenants or Tenants())
        self._clock = clock
        self._changed = asyncio.Event()
        service.on_change = self._wake

    async def call(self, name: str, body: bytes, caller: TenantId | None = None) -> bytes:
        """Answers one call with a JSON reply. Raises PeerProtocolError for an invalid call,
        HTTPForbidden for another tenant's. `caller` None: the operator."""
        message = decoded_call(name, body)
        self.owners.check(message, caller)
        reply = self.service.call(message)
        if isinstance(message, Enter):
            reply = await self._awaited(message, reply)
        return msgspec.json.encode(reply)

    async def tick(self) -> None:
        """Ticks the phase service for as long as the control lives."""
        while True:
            self.service.tick()
            await asyncio.sleep(TICK_S)

    async def _awaited(self, entry: Enter, reply: Reply) -> Reply:
        # A caller that is held for a lease counts as silent, and others pass it.
        most_s = min(WAIT_MAX_S, self.service.config.lease_s / 3)
        until_s = self._clock.now() + min(entry.wait_s, most_s)
        while isinstance(reply, Waiting) and (left_s := until_s - self._clock.now()) > 0:
            changed = self._changed
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                pass
            reply = self.service.entry_reply(entry)
        return reply

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
