"""The shell around the routing policy: turns wait here for their place."""

import asyncio
from collections import Counter
from collections.abc import Callable

from harvester.contracts.clock import Clock
from scheduler.policy.routing import (
    RoutingPolicy,
)
from scheduler.policy.routing_events import (
    DispatchTurn,
    QueueTurn,
    Refusal,
    RefuseTurn,
    RoutingEvent,
    TurnArrived,
    TurnLeft,
    TurnWithdrawn,
)
from scheduler.policy.trajectories import Turn


class Dispatcher:
    def __init__(self, policy: RoutingPolicy, clock: Clock, *, queue_s: float) -> None:
        self.policy = policy
        self._clock = clock
        self._queue_s = queue_s
        self._waiting: dict[str, asyncio.Future[DispatchTurn | RefuseTurn]] = {}
        self.dispatched: Counter[str] = Counter()
        """Turns placed so far, by reason."""
        self.on_queued: Callable[[], None] = lambda: None
        """Called when a turn finds no place."""

    def observe(self, event: RoutingEvent) -> None:
        for effect in self.policy.observe(event, now=self._clock.now()):
            match effect:
                case QueueTurn():
                    self.on_queued()
                case DispatchTurn() | RefuseTurn():
                    waiting = self._waiting.get(effect.turn)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(effect)
                    elif isinstance(effect, DispatchTurn):
                        self.leave(effect.turn)

    async def place(self, turn: Turn, *, resumed: bool) -> DispatchTurn | RefuseTurn:
        """Wait for a place. A refusal also ends a wait that became too long."""
        arrived = arrival(turn, resumed=resumed)
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[arrived.turn] = waiting
        try:
            self.observe(arrived)
            async with asyncio.timeout(self._queue_s):
                placed: DispatchTurn | RefuseTurn = await asyncio.shield(waiting)
        except TimeoutError:
            self._give_up(arrived.turn, waiting)
            reason = f"no engine had a place for {self._queue_s:.0f} s"
            return RefuseTurn(turn=arrived.turn, refusal=Refusal.FULL, reason=reason)
        except asyncio.CancelledError:
            self._give_up(arrived.turn, waiting)
            raise
        finally:
            self._waiting.pop(arrived.turn, None)
        if isinstance(placed, DispatchTurn):
            self.dispatched[placed.reason] += 1
        return placed

    def close(self) -> None:
        """Refuse all who wait."""
        for turn, waiting in tuple(self._waiting.items()):
            if not waiting.done():
                self.observe(TurnWithdrawn(turn=turn))
                reason = "the gateway is shutting down"
                waiting.set_result(RefuseTurn(turn=turn, refusal=Refusal.FULL, reason=reason))

    def leave(
        self, turn: str, *, tokens: int = 0, seconds: float = 0.0, stalled: bool = False
    ) -> None:
        self.observe(TurnLeft(turn=turn, tokens=tokens, seconds=seconds, stalled=stalled))

    def has_other_place(self, turn: Turn) -> bool:
        return self.policy.has_other_place(arrival(turn, resumed=True), now=self._clock.now())

    def _give_up(self, turn: str, waiting: asyncio.Future[DispatchTurn | RefuseTurn]) -> None:
        if waiting.done() and isinstance(waiting.result(), DispatchTurn):
            self.leave(turn)
        elif not waiting.done():
            waiting.cancel()
            self.observe(TurnWithdrawn(turn=turn))


def arrival(turn: Turn, *, resumed: bool) -> TurnArrived:
    pin = turn.request.weight_version
    return TurnArrived(
        turn=turn.key,
        trajectory=turn.trajectory,
        job=turn.job,
        tokens=turn.remaining_tokens,
        exact=pin.exact,
        minimum=pin.minimum,
        resumed=resumed,
    )
