"""The shell around the routing policy: turns wait here for their place."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from harvester.contracts.clock import Clock
from harvester.contracts.ids import EngineId
from harvester.contracts.wire.rollouts import GenerateRequest
from harvester.platform.tenant_shares import Pressure
from scheduler.gateway.engine_registry import EngineRegistry
from scheduler.gateway.policy.course import EngineWait, TurnCourse
from scheduler.gateway.policy.routing import RoutingPolicy
from scheduler.gateway.policy.routing_events import (
    DispatchTurn,
    ForgetPrefix,
    QueueTurn,
    Refusal,
    RefuseTurn,
    RequestArrived,
    RequestLeft,
    RoutingEffect,
    RoutingEvent,
    TurnArrived,
    TurnLeft,
    TurnWithdrawn,
)
from scheduler.gateway.policy.turn import SHUTTING_DOWN, Turn


class Dispatcher:
    def __init__(
        self,
        policy: RoutingPolicy,
        registry: EngineRegistry,
        clock: Clock,
        *,
        queue_s: float,
        queued: asyncio.Event,
        on_fault: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        """`queued`: set when a turn finds no place. `on_fault`: called with an error of the
        policy, whose effects are lost with it."""
        self.policy = policy
        self._registry = registry
        self._clock = clock
        self._queue_s = queue_s
        self._waiting: dict[str, asyncio.Future[DispatchTurn | RefuseTurn]] = {}
        self.dispatched: Counter[str] = Counter()
        """Number of placed turns by reason."""
        self._queued, self._on_fault = queued, on_fault

    def observe(self, event: RoutingEvent) -> None:
        for effect in self._decided(event):
            match effect:
                case QueueTurn():
                    self._queued.set()
                case ForgetPrefix():
                    self._registry.forget_prefix(effect)
                case DispatchTurn() | RefuseTurn():
                    waiting = self._waiting.get(effect.turn)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(effect)
                    elif isinstance(effect, DispatchTurn):
                        self.observe(TurnLeft(turn=effect.turn))

    def _decided(self, event: RoutingEvent) -> tuple[RoutingEffect, ...]:
        try:
            return self.policy.observe(event, now=self._clock.now())
        except Exception as error:
            self._on_fault(error)
            raise

    @contextmanager
    def admitting(self, turns: Sequence[str]) -> Iterator[None]:
        """Room for all turns of a request, which arrive while the context is open.

        Raises Pressure where the queue has too little.
        """
        arrived = RequestArrived(turns=tuple(turns))
        for refused in self._decided(arrived):
            assert isinstance(refused, RefuseTurn)
            raise Pressure(refused.reason)
        try:
            yield
        finally:
            self.observe(RequestLeft(turns=arrived.turns))

    async def place(
        self,
        turn: Turn,
        course: TurnCourse,
        *,
        avoid: Iterable[EngineId] = (),
        unfit: Collection[EngineId] = (),
        until_s: float = math.inf,
    ) -> DispatchTurn | RefuseTurn | None:
        """Waits for a place on an engine until `until_s`, then returns None; a call with the same
        wait keeps the turn's place in the queue. `unfit`: engines that the turn avoids for good.

        Refuses a turn that no engine could serve for `queue_s` (the job's waits for a permit do not
        count), or whose pin no engine met in time.
        """
        arrived, wait = arrival(turn, course, avoid), course.wait
        if wait.since_s is None:
            wait.since_s = wait.servable_s = self._clock.now()
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[arrived.turn] = waiting
        try:
            self.observe(arrived)
            # Most turns find a place at once, without a turn of the event loop and a timer.
            placed = (
                waiting.result()
                if waiting.done()
                else await self._wait(arrived, waiting, wait, unfit, until_s)
            )
        except asyncio.CancelledError:
            self._give_up(arrived.turn, waiting)
            raise
        finally:
            self._waiting.pop(arrived.turn, None)
        if isinstance(placed, DispatchTurn):
            self.dispatched[placed.reason] += 1
        return placed

    async def _wait(
        self,
        arrived: TurnArrived,
        waiting: "asyncio.Future[DispatchTurn | RefuseTurn]",
        wait: EngineWait,
        unfit: Collection[EngineId],
        until_s: float,
    ) -> DispatchTurn | RefuseTurn | None:
        while True:
            since_s, job = self._clock.now(), arrived.job
            barred = self.policy.is_paused(job) or (
                not self._registry.may_use_dedicated(job)
                and not self.policy.engines.may_serve(arrived, unfit=unfit)
            )
            left_s = max(0.0, until_s - since_s)
            done, _ = await asyncio.wait((waiting,), timeout=min(self._queue_s / 4, left_s))
            now = self._clock.now()
            wait.barred_s += barred * (now - since_s)
            if done:
                return waiting.result()
            deferred = self.policy.defers(arrived.turn)
            may_serve = deferred or self.policy.engines.may_serve(arrived, unfit=unfit)
            if may_serve or not self._registry.may_use_dedicated(job):
                wait.servable_s = now
            if now - wait.servable_s >= self._queue_s:
                self._give_up(arrived.turn, waiting)
                served = f"no engine has served job {job}"
                if arrived.numerics:
                    served += f" with the numerics {arrived.numerics!r}"
                served += f" for {self._queue_s:.0f} s"
                reason = "; ".join([served, *self._registry.faults(job)[:1]])
                return RefuseTurn(turn=arrived.turn, refusal=Refusal.UNSERVED, reason=reason)
            if now >= until_s:
                self._give_up(arrived.turn, waiting)
                return None

    def close(self) -> None:
        """Refuse all waiting turns, also where the policy has failed."""
        refused = [turn for turn, waiting in self._waiting.items() if not waiting.done()]
        for turn in refused:
            refusal = RefuseTurn(turn=turn, refusal=Refusal.UNSERVED, reason=SHUTTING_DOWN)
            self._waiting[turn].set_result(refusal)
        for turn in refused:
            with suppress(Exception):
                self.observe(TurnWithdrawn(turn=turn))

    def other_places(self, turn: Turn, *, avoid: Iterable[EngineId]) -> int:
        arrived = arrival(turn, TurnCourse(resumed=True), avoid)
        return self.policy.other_places(arrived, now=self._clock.now())

    def _give_up(self, turn: str, waiting: asyncio.Future[DispatchTurn | RefuseTurn]) -> None:
        if waiting.done() and isinstance(waiting.result(), DispatchTurn):
            self.observe(TurnLeft(turn=turn))
        elif not waiting.done():
            waiting.cancel()
            self.observe(TurnWithdrawn(turn=turn))


def context_tokens(request: GenerateRequest) -> int:
    """Context that the request may fill, in tokens."""
    return len(request.token_ids) + request.sampling_params.max_tokens


def arrival(turn: Turn, course: TurnCourse, avoid: Iterable[EngineId] = ()) -> TurnArrived:
    return TurnArrived(
        turn=turn.key,
        trajectory=turn.trajectory,
        job=turn.job,
        tokens=turn.remaining_tokens,
        context_tokens=context_tokens(turn.request),
        exact=turn.pin.exact,
        minimum=turn.pin.minimum,
        pin_until_s=course.pin_until_s,
        numerics=turn.needed_numerics,
        resumed=course.resumed,
        since_s=course.wait.since_s,
        suspect=course.suspect,
        avoid=tuple(sorted(avoid)),
    )
