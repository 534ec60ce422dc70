"""Routes each turn to an engine: per turn, not per trajectory (ROSE, section 4.3).

    last engine of the trajectory, if it has a place (its KV prefix is there)
    else a dedicated engine with a place, else a leased guest with a place
    else the queue: turns of trajectories already begun first, then first come first served, but a
    freed place goes to a turn whose prefix is there before it goes to an older one

An empty queue means that the batch is at its tail. engine_selection.py says where a turn may go.

A turn whose pin no engine meets yet is deferred: outside the queue it counts neither as demand nor
as a turn ahead of others, until an engine or a publish meets the pin or its patience ends. A
pin that can never be met again, an older version than the job's, is refused at once.

The queue is bounded. A request of several turns is admitted once, with room for all of them, or
refused; one turn alone is refused where it would have to wait.
A decision costs O(engines), with a queue that for each of its lines. Opens no connection and reads
no clock.
"""

import math
from collections.abc import Iterator

from harvester.contracts.ids import EngineId, JobId
from scheduler.gateway.policy.engine_selection import EngineSelection
from scheduler.gateway.policy.routing_events import (
    ContextLimited,
    DeferTurn,
    DispatchReason,
    DispatchTurn,
    EngineOffered,
    EngineWithdrawn,
    JobPaused,
    QueueTurn,
    Refusal,
    RefuseTurn,
    RequestArrived,
    RequestLeft,
    RoutingConfig,
    RoutingEffect,
    RoutingEvent,
    TrajectoryEnded,
    TurnArrived,
    TurnCleared,
    TurnLeft,
    TurnWithdrawn,
)
from scheduler.gateway.policy.turn_queue import LineKey, QueuePriority, TurnQueue, WaitingTurn
from scheduler.gateway.policy.versions_events import Retarget, TimePassed


class RoutingPolicy:
    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self.engines = EngineSelection(config)
        self._placed: dict[str, tuple[JobId, EngineId]] = {}
        self._paused: set[JobId] = set()
        self._queue = TurnQueue()
        self._deferred: dict[str, TurnArrived] = {}
        """Turns whose pin no engine meets yet, in the order of their arrival."""
        self._admitted: set[str] = set()
        """Turns of requests that were admitted whole."""
        self._arriving: set[str] = set()
        """Admitted turns that hold room and have not arrived yet."""
        self._target: Retarget | None = None
        self._context_limit: int | None = None

    def reconfigure(self, config: RoutingConfig) -> None:
        """Queued and placed turns stay, and what engines have shown of their speed."""
        self._config = config
        self.engines.reconfigure(config)

    @property
    def queued_turns(self) -> int:
        return len(self._queue)

    @property
    def room(self) -> int:
        """Turns that may still wait."""
        waiting = len(self._queue) + len(self._deferred) + len(self._arriving)
        return self._config.queue_turns - waiting

    @property
    def open_turns(self) -> int:
        return len(self._placed)

    def queued_turns_of(self, job: JobId) -> int:
        return self._queue.turns_of(job)

    def deferred_turns_of(self, job: JobId) -> int:
        return sum(turn.job == job for turn in self._deferred.values())

    def open_turns_of(self, job: JobId) -> int:
        return sum(placed == job for placed, _ in self._placed.values())

    def uses_engines(self, job: JobId) -> bool:
        """Whether the job has turns on engines or in line for them. A turn that is deferred for its
        pin, or waits for the end of a pause, uses none, however long it waits."""
        queued = not self.is_paused(job) and self.queued_turns_of(job)
        return bool(self.open_turns_of(job) or queued)

    def defers(self, turn: str) -> bool:
        return turn in self._deferred

    def is_paused(self, job: JobId) -> bool:
        return job in self._paused

    def other_places(self, turn: TurnArrived, *, now: float) -> int:
        """Number of places on other engines where a stalled turn could go on at once."""
        if turn.job in self._paused:
            return 0
        _, here = self._placed.get(turn.turn, (turn.job, None))
        return self.engines.other_places(turn, here, queued=len(self._queue), now=now)

    def observe(self, event: RoutingEvent, *, now: float) -> tuple[RoutingEffect, ...]:
        match event:
            case RequestArrived():
                return self._admit(event)
            case RequestLeft():
                self._admitted.difference_update(event.turns)
                self._arriving.difference_update(event.turns)
            case TurnArrived():
                self._arriving.discard(event.turn)
                return self._arrive(event, now)
            case TurnLeft():
                self._leave(event, now)
            case TurnWithdrawn():
                self._queue.remove(event.turn)
                self._deferred.pop(event.turn, None)
            case TurnCleared():
                self.engines.end_trial(event.turn)
            case EngineOffered():
                self._offer(event)
            case EngineWithdrawn():
                self.engines.withdraw(event.engine)
            case Retarget():
                self._target = event
                self._tell_versions_apart()
            case ContextLimited():
                self._context_limit = event.tokens
            case JobPaused():
                (self._paused.add if event.paused else self._paused.discard)(event.job)
            case TrajectoryEnded():
                return tuple(self.engines.forget(event))
        released: tuple[RoutingEffect, ...] = ()
        if isinstance(event, EngineOffered | Retarget | ContextLimited | TimePassed):
            released = self._review_deferred(now)
        if isinstance(event, EngineWithdrawn | Retarget | ContextLimited):
            return (*released, *self._drain(now), *self._refuse_stale(now))
        return (*released, *self._drain(now))

    def _offer(self, event: EngineOffered) -> None:
        self.engines.offer(event)
        self._queue.split_at(event.context_tokens)
        self._tell_versions_apart()

    def _tell_versions_apart(self) -> None:
        newest = [self._target.version] if self._target is not None else []
        self._queue.tell_apart([*newest, *self.engines.versions()])

    def _admit(self, request: RequestArrived) -> tuple[RefuseTurn, ...]:
        if len(request.turns) > self.room:
            room = f"{len(request.turns)} turns, and the queue has room for {max(0, self.room)}"
            return tuple(
                RefuseTurn(turn=turn, refusal=Refusal.FULL, reason=room) for turn in request.turns
            )
        self._admitted.update(request.turns)
        self._arriving.update(request.turns)
        return ()

    def _arrive(self, turn: TurnArrived, now: float) -> tuple[RoutingEffect, ...]:
        refused = self._refusal(turn, now)
        if refused is not None:
            return (refused,)
        waited = turn.resumed or turn.since_s is not None
        may_wait = self.room > 0 or waited or turn.turn in self._admitted
        if (unmet := self._unmet(turn)) and may_wait:
            self._deferred[turn.turn] = turn
            return (DeferTurn(turn=turn.turn, reason=unmet),)
        if not self._queue.has_line(turn):
            chosen = self._choose(turn, now)
            if chosen is not None:
                return (self._dispatch(turn, *chosen, now),)
        if not may_wait:
            reason = f"{self._config.queue_turns - self.room} turns are waiting"
            return (RefuseTurn(turn=turn.turn, refusal=Refusal.FULL, reason=reason),)
        return (self._wait(turn, now), *self._drain(now))

    def _wait(self, turn: TurnArrived, now: float) -> QueueTurn:
        last = self.engines.last(turn)
        begun = last is not None and self._config.begun_first
        priority = QueuePriority.BEGUN if begun else QueuePriority.FRESH
        if turn.resumed:
            priority = QueuePriority.RESUMED
        since_s = now if turn.since_s is None else turn.since_s
        near = last if priority is QueuePriority.BEGUN else None
        self._queue.add(WaitingTurn(turn, priority, since_s, near))
        return QueueTurn(turn=turn.turn)

    def _review_deferred(self, now: float) -> tuple[RoutingEffect, ...]:
        """Queues deferred turns whose pin can be met now; refuses turns that waited long enough."""
        reviewed: list[RoutingEffect] = []
        waits: dict[tuple[LineKey, bool], bool] = {}
        for turn in tuple(self._deferred.values()):
            key = self._queue.line_key(turn), bool(self.too_long(turn.job, turn.context_tokens))
            if key not in waits:
                waits[key] = not self._refusal(turn, -math.inf) and bool(self._unmet(turn))
            if waits[key] and now < turn.pin_until_s:
                continue
            del self._deferred[turn.turn]
            reviewed.append(self._refusal(turn, now) or self._wait(turn, now))
        return tuple(reviewed)

    def _leave(self, event: TurnLeft, now: float) -> None:
        _, engine = self._placed.pop(event.turn, (None, None))
        if engine is not None:
            self.engines.leave(event, engine, now=now)

    def _refusal(self, turn: TurnArrived, now: float) -> RefuseTurn | None:
        target = self._target
        if target is None or turn.job != target.job:
            # The active job may be another tenant's, so the text does not name it.
            active = "another one is" if target else "none is"
            how = f"POST /v1/jobs/{turn.job}/activate"
            reason = f"job {turn.job} is not active ({active}); activate it first: {how}"
            return RefuseTurn(turn=turn.turn, refusal=Refusal.JOB, reason=reason)
        if reason := self.too_long(turn.job, turn.context_tokens):
            return RefuseTurn(turn=turn.turn, refusal=Refusal.CONTEXT, reason=reason)
        unmet = self._unmet(turn)
        gone = turn.exact is not None and turn.exact < target.version
        if not unmet or (not gone and now < turn.pin_until_s):
            return None
        refusal = Refusal.GONE if gone else Refusal.VERSION
        return RefuseTurn(turn=turn.turn, refusal=refusal, reason=unmet)

    def too_long(self, job: JobId, context_tokens: int) -> str:
        """Why no engine holds a turn of `context_tokens` of the active job; "" if one may."""
        limit, active = self._context_limit, self._target is not None and self._target.job == job
        if not active or limit is None or context_tokens <= limit:
            return ""
        return (
            f"prompt and max_tokens are {context_tokens} tokens together; "
            f"the largest context of any engine is {limit}"
        )

    def _unmet(self, turn: TurnArrived) -> str:
        """Why the turn's pin is met neither by the job's newest version nor by an engine."""
        target = self._target
        assert target is not None
        newest = target.version
        met = turn.exact in (None, newest) and newest >= (turn.minimum or 0)
        if not met and not self.engines.may_serve(turn):
            required = turn.exact if turn.exact is not None else f"at least {turn.minimum}"
            return f"version {required} is served nowhere; job {turn.job} is at {newest}"
        labels = self.engines.numerics()
        if turn.numerics and turn.numerics not in labels:
            known = " or ".join(repr(each) for each in sorted(labels)) or "none yet"
            return f"no engine has the numerics {turn.numerics!r}; known: {known}"
        return ""

    def _refuse_stale(self, now: float) -> Iterator[RefuseTurn]:
        for turn in self._queue:
            if (refused := self._refusal(turn, now)) is not None:
                self._queue.remove(turn.turn)
                yield refused

    def _drain(self, now: float) -> tuple[RoutingEffect, ...]:
        """Give freed places to waiting turns, by priority, in each priority the oldest first.

        A turn that no free engine may serve blocks only the turns of its own line.
        """
        placed: list[RoutingEffect] = []
        for priority in QueuePriority if self._queue else ():
            for first in self._queue.oldest_first(priority):
                turn = first.turn
                chosen = self._choose(turn, now)
                if chosen is None:
                    continue
                engine, reason = chosen
                nearer = None
                if priority is QueuePriority.BEGUN and reason is not DispatchReason.AFFINITY:
                    nearer = self._nearer(first, engine, now)
                if nearer is not None:
                    turn, reason = nearer, DispatchReason.AFFINITY
                self._queue.remove(turn.turn)
                placed.append(self._dispatch(turn, engine, reason, now))
        self._queue.drop_empty_lines()
        return tuple(placed)

    def _nearer(self, older: WaitingTurn, engine: EngineId, now: float) -> TurnArrived | None:
        """The oldest turn of its line whose prefix is on `engine`, while `older` can wait."""
        if now - older.since_s > self._config.patience_s:
            return None
        return self._queue.nearest(older, engine, lambda turn: self.engines.last(turn) == engine)

    def _choose(self, turn: TurnArrived, now: float) -> tuple[EngineId, DispatchReason] | None:
        if turn.job in self._paused:
            return None
        return self.engines.choose(turn, queued=len(self._queue), now=now)

    def _dispatch(
        self, turn: TurnArrived, engine: EngineId, reason: DispatchReason, now: float
    ) -> DispatchTurn:
        self._placed[turn.turn] = (turn.job, engine)
        version = self.engines.begin(turn, engine, now=now)
        return DispatchTurn(turn=turn.turn, engine=engine, version=version, reason=reason)
