"""A rollout that ends on a lease: its tail leaves the job's own node to whoever waits for it.

permit    ->  the job's turns may run on its dedicated engine, and it leases
asked to make room, and a guest serves  ->  dedicated engine left, permit narrowed to no node
the node is free again                  ->  the permit is asked for again, the tail ends there
the guest is gone for good              ->  the same, in line: no promise rests on somebody
                                            else's idle time
done      ->  lease and engine given up, the next phase begins
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from harvester.contracts.clock import Clock
from harvester.contracts.ids import NodeId
from scheduler.phases.control import PhaseControl
from scheduler.phases.permit import Permit
from scheduler.phases.wire import JobStatus
from scheduler.policy.model import EngineKind, PhaseKind

_LOOK_S = 0.1
_GONE_S = 3.0
"""A lease that is cut may come back within this: production was busy for a moment."""

T = TypeVar("T")


class Gateway(Protocol):
    async def dedicated(self, job: str, *, enabled: bool) -> None: ...
    async def harvesting(self, job: str, *, enabled: bool) -> None: ...
    async def status(self) -> dict[str, Any]: ...


class Jobs(Protocol):
    """Who holds what and who waits; a transport to the phase control says it."""

    def jobs(self) -> tuple[JobStatus, ...]: ...


class LeasedRollout:
    """One job's rollouts, one at a time. `progress` may be called from the collecting task."""

    def __init__(
        self, gateway: Gateway, control: PhaseControl, jobs: Jobs, node: NodeId, clock: Clock
    ) -> None:
        self._gateway = gateway
        self._job = control.job
        self._control = control
        self._jobs = jobs
        self._node = node
        self._clock = clock
        self._complete_ratio = 0.0
        self._served_s: float | None = None
        """When the guest was last seen to serve the tail; None while the node is the job's."""
        self.permit: Permit | None = None
        self.tails = 0
        """Times that a tail went to the lease alone."""
        self.tail_s = 0.0
        """For which it stayed there."""
        self.returns = 0
        """Times that it came back to a free node."""
        self.losses = 0
        """Times that it went back in line, because the lease was lost."""

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
                if not working.done():
                    permit.progress(self._complete_ratio)
                    permit = await self._looked(permit)
            self._stay()
            return working.result()
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(working, return_exceptions=True)
            await self._use(dedicated=False, lease=False)

    async def _looked(self, permit: Permit) -> Permit:
        if self._served_s is None:
            if permit.keep == () and await self._guest_serves():
                await self._gateway.dedicated(self._job, enabled=False)
                permit.narrowed()
                self.tails += 1
                self._served_s = self._clock.now()
        elif await asyncio.to_thread(self._node_is_free, permit):
            self.returns += 1
            permit = await self._returned(permit)
        elif await self._guest_serves():
            self._stay()
        elif self._clock.now() - self._served_s > _GONE_S:
            self.losses += 1
            permit = await self._returned(permit)
        return permit

    def _stay(self) -> None:
        if self._served_s is not None:
            now = self._clock.now()
            self.tail_s, self._served_s = self.tail_s + now - self._served_s, now

    async def _returned(self, permit: Permit) -> Permit:
        """To the end of the line for the job's own node; until its turn comes the guest goes on."""
        await asyncio.to_thread(self._control.end, permit)
        permit = self.permit = await asyncio.to_thread(self._control.begin, PhaseKind.ROLLOUT)
        await self._gateway.dedicated(self._job, enabled=True)
        self._stay()
        self._served_s = None
        return permit

    def _node_is_free(self, permit: Permit) -> bool:
        """Left by this job's tail, held by nobody else and waited for by nobody."""
        others = (each for each in self._jobs.jobs() if each.job != self._job)
        wanted = any(self._node in (*each.nodes, *each.awaits) for each in others)
        return not wanted and self._node not in permit.nodes

    async def _guest_serves(self) -> bool:
        engines = (await self._gateway.status())["engines"].values()
        return any(
            engine["kind"] == EngineKind.GUEST and engine["state"] == "serving"
            for engine in engines
        )

    async def _use(self, *, dedicated: bool, lease: bool) -> None:
        await self._gateway.dedicated(self._job, enabled=dedicated)
        await self._gateway.harvesting(self._job, enabled=lease)
