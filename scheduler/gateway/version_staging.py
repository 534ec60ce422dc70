"""Engines prepare the version that they serve next while their turns run."""

import asyncio
import logging
import math

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import EngineId
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.engines.engine_client import StageReply
from scheduler.gateway.engines.identity import HeldWeights
from scheduler.gateway.policy.versions_events import JobVersion
from scheduler.model import EngineKind

_log = logging.getLogger(__name__)
_LATE = (
    "engines %s prepare the rest of version %d of store %s while they are paused: timeouts.stage_s "
    "was too short"
)
SHOWN_S = 10.0
"""Longest delay with which a store shows a new version to engines after its publisher."""
STAGE_AGAIN_S = 1.0


class VersionStaging:
    """Stages one version at a time: an engine keeps only its last preparation."""

    def __init__(self, fleet: EngineFleet, clock: Clock, *, stage_s: float) -> None:
        """`stage_s`: longest wait for engines that prepare a version while they sample."""
        self._fleet = fleet
        self._clock = clock
        self._stage_s = stage_s
        self._lock = asyncio.Lock()

    async def prepare(self, target: JobVersion, *, patience_s: float) -> None:
        """Waits only for dedicated engines, and for `stage_s`: an engine that is not ready then
        prepares the rest while it is paused. A version that the policy would refuse is not
        prepared.

        Raises Exhausted if all of them report for `patience_s` that they cannot load it, since a
        switch would leave the job without an engine.
        """
        until_s = math.inf
        while True:
            # For one try: a version that no engine can load holds up no other.
            async with self._lock:
                if not self._is_next(target):
                    return
                if until_s == math.inf:
                    until_s = self._clock.now() + patience_s
                    self._staging(target, EngineKind.GUEST)
                staging = self._staging(target, EngineKind.DEDICATED)
                replies = await asyncio.gather(*staging.values())
                late = [name for name, each in zip(staging, replies, strict=True) if each.late]
                if late:
                    _log.warning(_LATE, ", ".join(late), target.version, target.store)
            faults = [each.fault for each in replies]
            if not faults or not all(faults):
                return
            if self._clock.now() >= until_s:
                what = f"no engine can load version {target.version} of store {target.store}"
                raise Exhausted(f"nothing was changed: {what}: {faults[0]}")
            await asyncio.sleep(STAGE_AGAIN_S)

    def _is_next(self, target: JobVersion) -> bool:
        """Whether the version is still next: neither overtaken, refused nor loaded."""
        policy = self._fleet.policy
        return bool(target.version) and target != policy.target and not policy.refusal(target)

    def _staging(
        self, target: JobVersion, kind: EngineKind
    ) -> dict[EngineId, asyncio.Task[StageReply]]:
        held = HeldWeights(target.store, target.version)
        adapter = self._fleet.adapter_of(target.job)
        return {
            name: self._fleet.spawn(
                member.client.stage(held, timeout_s=self._stage_s, adapter=adapter)
            )
            for name, member in self._fleet.members.items()
            # A guest is proved to be the slot's when it is described.
            if member.up
            and member.engine.kind is kind
            and (member.is_described or kind is EngineKind.DEDICATED)
        }
