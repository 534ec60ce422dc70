"""Engines prepare the version that they serve next while their turns run."""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.engines.engine_control import StageReply
from scheduler.gateway.engines.identity import HeldWeights
from scheduler.gateway.fleet_member import FleetMember
from scheduler.gateway.gateway_metrics import GatewayMetrics
from scheduler.gateway.policy.versions_events import JobVersion
from scheduler.model import EngineKind

_log = logging.getLogger(__name__)
SHOWN_S = 10.0
"""Longest delay with which a store shows a new version to engines after its publisher."""
STAGE_AGAIN_S = 1.0
_LOOK_S = 0.2
"""Period of looks at whether an engine that prepares is still up."""


@dataclass(slots=True)
class VersionStaging:
    """Stages one version at a time: an engine keeps only its last preparation, and ends one that
    runs before it begins the next."""

    _fleet: EngineFleet
    _metrics: GatewayMetrics
    _clock: Clock
    stage_s: float
    """Longest wait for engines that prepare a version while they sample."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _in_line: list[JobVersion] = field(default_factory=list)
    """Versions whose preparation has not begun."""

    async def prepare(
        self, target: JobVersion, *, patience_s: float, is_due: Callable[[], bool] = lambda: True
    ) -> None:
        """Waits only for dedicated engines, until each is ready, is lost or reports a fault.
        A version that the policy would refuse, or that is not due in its turn, is not prepared.

        Raises Exhausted if all of them report for `patience_s` that they cannot load it, since a
        switch would leave the job without an engine, and if a newer one of the job is in line.
        """
        self._in_line.append(target)
        try:
            await self._lock.acquire()
        finally:
            self._in_line.remove(target)
        until_s = math.inf
        while True:
            # For one try: a version that no engine can load holds up no other.
            try:
                if not (self._is_next(target) and is_due()):
                    return
                newer = [e.version for e in self._in_line if e.job == target.job]
                if max(newer, default=0) > target.version:
                    raise Exhausted(f"nothing was changed: version {max(newer)} takes its place")
                if until_s == math.inf:
                    until_s = self._clock.now() + patience_s
                    self._staging(target, EngineKind.GUEST)
                fault = await self._fault(target)
            finally:
                self._lock.release()
            if not fault:
                return
            if self._clock.now() >= until_s:
                what = f"no engine can load version {target.version} of store {target.store}"
                raise Exhausted(f"nothing was changed: {what}: {fault}")
            await asyncio.sleep(STAGE_AGAIN_S)
            await self._lock.acquire()

    async def _fault(self, target: JobVersion) -> str:
        """Why no dedicated engine can load the version; "" if one can, or there is none."""
        began_s, staging = self._clock.now(), self._staging(target, EngineKind.DEDICATED)
        try:
            while waiting := [e for m, e in staging.items() if m.up and not e.done()]:
                await asyncio.wait(waiting, timeout=_LOOK_S)
        finally:
            for each in staging.values():
                each.cancel()
        # One that is lost, and may be back, is updated when it joins.
        replies = {m.engine.engine: e.result() for m, e in staging.items() if m.up and e.done()}
        if replies and all(reply.fault for reply in replies.values()):
            return next(iter(replies.values())).fault
        late = [engine for engine, reply in replies.items() if not (reply.ready or reply.fault)]
        for engine in late if self._is_next(target) else ():
            line = "engine %s switches unprepared: version %d of store %s, %.1f s waited"
            waited_s = self._clock.now() - began_s
            _log.warning(line, engine, target.version, target.store, waited_s)
        return ""

    def _is_next(self, target: JobVersion) -> bool:
        """Whether the version is still next: neither overtaken, refused nor loaded."""
        policy = self._fleet.policy
        return bool(target.version) and target != policy.target and not policy.refusal(target)

    def _staging(
        self, target: JobVersion, kind: EngineKind
    ) -> dict[FleetMember, asyncio.Task[StageReply]]:
        return {
            member: self._fleet.spawn(self._stage(member, target))
            for member in self._fleet.members.values()
            # A guest is proved to be the slot's when it is described.
            if member.up
            and member.engine.kind is kind
            and (member.is_described or kind is EngineKind.DEDICATED)
        }

    async def _stage(self, member: FleetMember, target: JobVersion) -> StageReply:
        began_s = self._clock.now()
        reply = await member.client.stage(
            HeldWeights(target.store, target.version),
            timeout_s=self.stage_s,
            adapter=self._fleet.registry.jobs[target.job].adapter,
            # Asked after its switch, a guest would prepare the version again.
            goes_on=lambda: member.up and self._is_next(target),
        )
        outcome = "ready" if reply.ready else "failed" if reply.fault else "late"
        staging_s = self._metrics.staging_s.labels(member.engine.kind, outcome)
        staging_s.observe(self._clock.now() - began_s)
        return reply
