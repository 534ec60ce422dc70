"""Whether engines live, and are the ones that were given the version: probed when an attempt
breaks, and from time to time."""

import asyncio
import math
from dataclasses import dataclass

from harvester.contracts.clock import Clock
from harvester.contracts.errors import RoseMuxError
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.engines.engine_faults import EngineLost
from scheduler.gateway.engines.identity import Change
from scheduler.gateway.fleet_member import FleetMember
from scheduler.gateway.policy.versions_events import TimePassed
from scheduler.gateway.request_blame import RequestBlame
from scheduler.gateway.running_attempt import CutReason

_LATE_FOR_S = 5.0
"""Time after which an event loop that was late is not taken for the cause of a timeout."""


@dataclass(slots=True)
class EngineProbing:
    _fleet: EngineFleet
    _blame: RequestBlame
    _clock: Clock
    _late_at_s: float = -math.inf

    async def run(self, *, period_s: float) -> None:
        """Bring engines that answer into the fleet and give failed updates their next try."""
        while True:
            await self._probe()
            self._fleet.switching.observe(TimePassed())
            await asyncio.sleep(period_s)

    async def _probe(self) -> None:
        fleet, now = self._fleet, self._clock.now()
        members = fleet.members.values()
        waiting = [m for m in members if not m.up and now >= m.foreign_changes.until_s]
        quiet = [m for m in members if m.up and not m.running and not m.updating]
        changed = await asyncio.gather(*(member.client.changed(frugal=True) for member in quiet))
        for member, change in zip(quiet, changed, strict=True):
            if change is Change.WEIGHTS and not member.updating:
                self._weights_changed(member)
            elif change is Change.PROCESS and not member.updating:
                fleet.down(member, "no engine or another one answers in its place")
        became = await asyncio.gather(*(member.client.became() for member in waiting))
        for member, change in zip(waiting, became, strict=True):
            if not member.losses:
                fleet.log_fault(member, member.client.health_fault)
                member.fault = member.client.health_fault
            self.answered(member, change)
        for member in fleet.members.values():
            fleet.log_state(member)

    async def attempt_broke(
        self, member: FleetMember, error: RoseMuxError, *, began_s: float
    ) -> Change:
        """Probes the engine of a broken attempt for a change, and marks it down unless it is NONE.

        Returns UNKNOWN also if another attempt already saw the loss: the engine may be back by
        now. An engine that only breaks stream after stream is marked down for a moment.
        """
        losses = member.losses
        streams = isinstance(error, EngineLost) and member.streak.fail(
            began_s=began_s, now=self._clock.now()
        )
        change = getattr(error, "change", Change.NONE)
        if change is Change.NONE and member.up:
            if member.probing is None or member.probing.done():
                member.probing = self._fleet.spawn(member.client.became())
            change = await asyncio.shield(member.probing)
        if member.losses != losses or not member.up:
            return Change.UNKNOWN
        match change:
            case Change.WEIGHTS:
                self._weights_changed(member)
            case Change.PROCESS:
                self._fleet.down(member, str(error))
            case Change.UNKNOWN if self._clock.now() - self._late_at_s < _LATE_FOR_S:
                # The engine may have answered in time while this event loop was late. Its turns,
                # each on a trial of its own, would keep the loop late.
                return Change.NONE
            case Change.UNKNOWN:
                self._fleet.down(member, str(error), cut=CutReason.DOUBT)
            case Change.NONE if streams:
                fault = f"it breaks stream upon stream: {error}"
                self._fleet.down(member, fault, cut=CutReason.STREAMS)
        return change

    def was_late(self) -> None:
        """The event loop has just been late: silence may be its own."""
        self._late_at_s = self._clock.now()

    def answered(self, member: FleetMember, change: Change) -> None:
        """Applies a probe's result to a member that is down."""
        if change is Change.UNKNOWN or self._fleet.members.get(member.engine.engine) is not member:
            return
        dead = change is Change.PROCESS
        if (lost := member.doubted) is not None:
            member.doubted = None
            member.client.forget()
            self._blame.proved(member.engine.engine, lost, dead=dead, now=self._clock.now())
        if not dead:
            self._fleet.up(member)

    def _weights_changed(self, member: FleetMember) -> None:
        """Loads the version again after another caller changed the weights, each time later."""
        if not member.up:
            return
        fault = (
            "another client changes its weights; let one scheduler own the "
            "engine and remove it from all other configurations"
        )
        member.foreign_changes.seen(now=self._clock.now())
        self._fleet.down(member, fault, cut=CutReason.WEIGHTS)
