"""Moves turns off silent engines. A turn stays where no other engine has room for it."""

import asyncio
from dataclasses import dataclass

from harvester.contracts.clock import Clock
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.engine_probing import EngineProbing
from scheduler.gateway.fleet_member import FleetMember, unfit_for
from scheduler.gateway.gateway_metrics import GatewayMetrics
from scheduler.gateway.policy.versions_events import TimePassed
from scheduler.gateway.request_blame import RequestBlame
from scheduler.gateway.running_attempt import CutReason, RunningAttempt
from scheduler.gateway.settings import Timeouts
from scheduler.model import EngineKind

WATCH_S = 0.25


@dataclass(frozen=True, slots=True)
class StallWatch:
    _fleet: EngineFleet
    _probing: EngineProbing
    _dispatcher: Dispatcher
    _blame: RequestBlame
    _metrics: GatewayMetrics
    _clock: Clock
    _timeouts: Timeouts

    async def run(self) -> None:
        period_s = min(WATCH_S, self._timeouts.guest_tail_stall_s / 4)
        while True:
            due_s = self._clock.now() + period_s
            await asyncio.sleep(period_s)
            # An event loop that is late has read no engine meanwhile: that silence is its own.
            # Counted as the engines', an overload would move every turn, and so never end.
            late_s = max(0.0, self._clock.now() - due_s)
            self._metrics.loop_lag_s.observe(late_s)
            if late_s > WATCH_S:
                self._probing.was_late()
            self._dispatcher.observe(TimePassed())
            self._cut_stalled(late_s)

    def _cut_stalled(self, late_s: float) -> None:
        """Apart from `run`, whose frame would keep the last turn until the next."""
        moving = 0
        for member in tuple(self._fleet.members.values()):
            for running in tuple(member.running):
                running.excuse(late_s, now=self._clock.now())
                moving += self._moves(member, running, moving)

    def _moves(self, member: FleetMember, running: RunningAttempt, moving: int) -> bool:
        """Cuts a stalled turn; `moving` other turns leave already and have not taken their places
        yet."""
        now, kind = self._clock.now(), member.engine.kind
        silent_s = now - running.chunk_at_s
        tail = not self._dispatcher.policy.queued_turns
        dedicated = kind is EngineKind.DEDICATED
        usual_s = self._blame.first_tokens.usual_s if dedicated else 0.0
        stall_s = self._timeouts.moved_after_s(kind, tail=tail)
        stalls = silent_s > self._timeouts.silence_s
        if not stalls and silent_s > running.course.stall_after_s(
            stall_s, usual_first_token_s=usual_s
        ):
            unfit = unfit_for(running.turn, self._fleet.members)
            avoid = running.course.avoids(now=now).keys() | unfit
            stalls = self._dispatcher.other_places(running.turn, avoid=avoid) > moving
        if stalls:
            running.cut(CutReason.STALL)
        return stalls
