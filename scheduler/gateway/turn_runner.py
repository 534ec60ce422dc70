"""Carries one turn to its end: from engine to engine until it has ended, cancelled or lost."""

import asyncio
import math
from collections.abc import Callable

from harvester.contracts.clock import Clock
from harvester.contracts.ids import EngineId
from harvester.contracts.wire.rollouts import FinishReason, OnInterrupt
from scheduler.gateway.attempt_runner import AttemptRunner
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.engine_probing import EngineProbing
from scheduler.gateway.engines.engine_faults import RequestRefused
from scheduler.gateway.fleet_member import FleetMember, unfit_for
from scheduler.gateway.gateway_metrics import GatewayMetrics
from scheduler.gateway.policy.attempt import output_fields
from scheduler.gateway.policy.course import TurnCourse
from scheduler.gateway.policy.routing_events import DispatchTurn, Refusal, RefuseTurn, TurnLeft
from scheduler.gateway.policy.turn import SHUTTING_DOWN, Turn
from scheduler.gateway.request_blame import RequestBlame
from scheduler.gateway.running_attempt import CutReason
from scheduler.gateway.settings import Timeouts
from scheduler.gateway.stall_watch import WATCH_S, StallWatch

_UNFIT_S = 5.0
"""A turn that counts output looks this often for engines that may serve it."""


class TurnRunner:
    def __init__(
        self,
        fleet: EngineFleet,
        probing: EngineProbing,
        dispatcher: Dispatcher,
        blame: RequestBlame,
        metrics: GatewayMetrics,
        clock: Clock,
        *,
        timeouts: Timeouts,
        max_attempts: int,
        on_lease_refused: Callable[[FleetMember], None] = lambda _member: None,
    ) -> None:
        """`on_lease_refused`: called with the guest that refuses its lease's epoch."""
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._clock = clock
        self._timeouts = timeouts
        self._max_attempts = max_attempts
        self._closing = False
        self._blame = blame
        shared = fleet, probing, dispatcher, blame, metrics, clock, timeouts
        self.stalls = StallWatch(*shared)
        self._attempts = AttemptRunner(*shared, on_lease_refused, timeouts.shortest_silence_s / 10)
        self._metrics = metrics

    async def run(self, turn: Turn, on_tokens: Callable[[], None] | None) -> RefuseTurn | None:
        """Serve the turn to its end. Returns a refusal only before the first token.

        Raises RequestRefused if an engine rejects the request before any token.
        """
        wait_s = turn.request.weight_version.wait_s
        patience_s = self._timeouts.pin_s if wait_s is None else wait_s
        course = TurnCourse(pin_until_s=self._clock.now() + patience_s)
        while not turn.ended:
            if self._closing:
                turn.fault = SHUTTING_DOWN
                turn.end(FinishReason.ABORT)
                return None
            now = self._clock.now()
            if (refused := self._given_up(turn, course, now)) is not None:
                return None if turn.token_ids else refused
            placed = await self._place(turn, course, now)
            if placed is None:
                continue
            if isinstance(placed, RefuseTurn):
                turn.fault = placed.reason
                turn.refuse()
                return None if turn.token_ids else placed
            try:
                await self._attempts.run(turn, placed, course, on_tokens)
            except RequestRefused as error:
                turn.fail(str(error))
                if not turn.token_ids:
                    raise
            if course.interruption and turn.token_ids and not turn.ended:
                partial = self._returns_partial(turn)
                outcome = "returned" if partial else "continued"
                self._metrics.interruptions.labels(turn.job, course.interruption, outcome).inc()
                if partial:
                    turn.fault = f"interrupted ({course.interruption}): {course.why}"
                    turn.end(FinishReason.ABORT)
        return None

    def _returns_partial(self, turn: Turn) -> bool:
        """Whether a turn that is interrupted after its first token ends there."""
        own = turn.request.on_interrupt or self._fleet.registry.jobs[turn.job].on_interrupt
        return own is OnInterrupt.RETURN_PARTIAL

    def _given_up(self, turn: Turn, course: TurnCourse, now: float) -> RefuseTurn | None:
        """Ends a turn that is not to be tried again."""
        if reason := self._blame.quarantined(turn, now):
            turn.fail(reason)
            return RefuseTurn(turn=turn.key, refusal=Refusal.REQUEST, reason=reason)
        if turn.token_ids and turn.counts_output and self._nowhere(turn):
            turn.immovable = output_fields(turn.request.sampling_params)
            turn.fault = (
                f"its sampling counts output ({', '.join(turn.immovable)}), and no engine that is "
                "left goes on from it"
            )
            turn.end(FinishReason.ABORT)
            return RefuseTurn(turn=turn.key, refusal=Refusal.UNSERVED, reason=turn.fault)
        stuck_s = self._timeouts.stuck_s
        reason = course.given_up(max_deaths=self._max_attempts, stuck_s=stuck_s, now=now)
        if not reason:
            return None
        turn.fault = reason
        if turn.token_ids:
            turn.end(FinishReason.ABORT, lost=True)
        else:
            turn.refuse()
        return RefuseTurn(turn=turn.key, refusal=Refusal.UNSERVED, reason=reason)

    async def _place(
        self, turn: Turn, course: TurnCourse, now: float
    ) -> DispatchTurn | RefuseTurn | None:
        """The turn's placement, or None to review the turn again. `now`: the time of its review; a
        verdict that falls due after it delays the turn until the next review."""
        course.suspect = suspect = self._blame.tried_apart(turn, now)
        if wait_s := self._blame.verdict_in_s(turn, now):
            await asyncio.sleep(min(wait_s, WATCH_S))
            return None
        avoid = self._shunned(suspect, now) | course.avoids(now=now)
        # Looked at again soon: an engine may be described by then, or another one be there.
        unfit = unfit_for(turn, self._fleet.members) | course.too_short
        avoid |= dict.fromkeys(unfit, now + _UNFIT_S)
        placed = await self._dispatcher.place(
            turn, course, avoid=avoid, unfit=unfit, until_s=min(avoid.values(), default=math.inf)
        )
        # A request of the same content may have failed engines while this one waited.
        now = self._clock.now()
        unforeseen = self._blame.suspected(turn, now) and not suspect
        held = (
            self._blame.quarantined(turn, now) or unforeseen or self._blame.verdict_in_s(turn, now)
        )
        if isinstance(placed, DispatchTurn) and held:
            self._dispatcher.observe(TurnLeft(turn=turn.key))
            return None
        return placed

    def _shunned(self, suspect: str, now: float) -> dict[EngineId, float]:
        """Engines that the suspect avoids, while there is another engine."""
        shunned = self._blame.policy.shunned(suspect, now=now)
        up = {engine for engine, member in self._fleet.members.items() if member.up}
        return shunned if up - shunned.keys() else {}

    def _nowhere(self, turn: Turn) -> bool:
        """Whether every engine is known and none goes on from output. Guests may come back."""
        members = self._fleet.members.values()
        known = all(member.description is not None for member in members)
        return bool(members) and known and len(unfit_for(turn, self._fleet.members)) == len(members)

    def close(self) -> None:
        """End every turn with its tokens so far."""
        self._closing = True
        self._dispatcher.close()
        for member in self._fleet.members.values():
            for running in tuple(member.running):
                running.cut(CutReason.SHUTDOWN)
