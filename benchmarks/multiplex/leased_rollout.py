"""A rollout that ends on a lease: its tail leaves the job's own node to whoever waits for it.

permit    ->  the job's turns may run on its dedicated engine, and it leases
asked to make room, and a guest serves  ->  dedicated engine left, permit narrowed to no node
the guest is gone for good              ->  the permit is asked for again: no promise rests on
                                            somebody else's idle time
done      ->  lease and engine given up, the next phase begins
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from harvester.contracts.clock import Clock
from harvester.contracts.ids import JobId
from scheduler.demo.gateway_admin import GatewayAdmin
from scheduler.phases.control import PhaseControl
from scheduler.phases.permit import Permit
from scheduler.policy.model import EngineKind, PhaseKind

_LOOK_S = 0.1
_GONE_S = 3.0
"""A lease that is cut may come back within this: production was busy for a moment."""

T = TypeVar("T")


class LeasedRollout:
    """One job's rollouts, one at a time. `progress` may be called from the collecting task."""

    def __init__(self, gateway: GatewayAdmin, job: JobId, control: PhaseControl, clock: Clock):
        self._gateway = gateway
        self._job = job
        self._control = control
        self._clock = clock
        self._complete_ratio = 0.0
        self._served_s: float | None = None
        """When the guest was last seen to serve the tail; None while the node is the job's."""
        self.permit: Permit | None = None
        self.tails = 0
        """Rollouts that ended on the lease."""
        self.tail_s = 0.0
        """For which the job's node was another's meanwhile."""
        self.returns = 0
        """Tails whose lease was lost."""

    def progress(self, complete_ratio: float) -> None:
        self._complete_ratio = complete_ratio

    async def run(self, permit: Permit, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; `permit` of this object says what is held by then."""
        self._complete_ratio, self._served_s, self.permit = 0.0, None, permit
        await self._use(dedicated=True, lease=True)
        working = asyncio.ensure_future(work)
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=_LOOK_S)
                permit = self.permit = await self._looked(permit, ended=working.done())
            return working.result()
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(working, return_exceptions=True)
            await self._use(dedicated=False, lease=False)

    async def _looked(self, permit: Permit, *, ended: bool) -> Permit:
        permit.progress(self._complete_ratio)
        now = self._clock.now()
        if self._served_s is None:
            if not ended and permit.keep == () and await self._guest_serves():
                await self._gateway.dedicated(self._job, enabled=False)
                permit.narrowed()
                self.tails += 1
                self._served_s = now
        elif ended or await self._guest_serves():
            self.tail_s += now - self._served_s
            self._served_s = now
        elif now - self._served_s > _GONE_S:
            permit = await self._returned(permit)
        return permit

    async def _returned(self, permit: Permit) -> Permit:
        """To the end of the line for the job's own node."""
        self.returns += 1
        await asyncio.to_thread(self._control.end, permit)
        permit = self.permit = await asyncio.to_thread(self._control.begin, PhaseKind.ROLLOUT)
        await self._gateway.dedicated(self._job, enabled=True)
        self._served_s = None
        return permit

    async def _guest_serves(self) -> bool:
        engines = (await self._gateway.status())["engines"].values()
        return any(
            engine["kind"] == EngineKind.GUEST and engine["state"] == "serving"
            for engine in engines
        )

    async def _use(self, *, dedicated: bool, lease: bool) -> None:
        await self._gateway.dedicated(self._job, enabled=dedicated)
        await self._gateway.harvesting(self._job, enabled=lease)
