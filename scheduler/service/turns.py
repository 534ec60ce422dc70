"""Carries one turn to its end: from engine to engine until it has ended, cancelled or lost."""

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted, Stale
from harvester.contracts.ids import Epoch
from harvester.contracts.wire.rollouts import FinishReason
from scheduler.policy.model import EngineKind
from scheduler.policy.routing_events import (
    DispatchTurn,
    QueueReviewed,
    RefuseTurn,
)
from scheduler.policy.trajectories import Attempt, Turn
from scheduler.service.config import Timeouts
from scheduler.service.dispatch import Dispatcher
from scheduler.service.engine import EngineLost
from scheduler.service.fleet import Cut, Fleet, Member

_WATCH_S = 0.25
_FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class TurnObserver(Protocol):
    """Told what becomes of attempts, a few times per turn and never per token."""

    def generated(self, turn: Turn, member: Member, tokens: int) -> None: ...

    def lease_refused(self, member: Member) -> None: ...


@dataclass(slots=True, eq=False)
class RunningAttempt:
    turn: Turn
    began_s: float
    heard_s: float
    task: "asyncio.Task[FinishReason | None] | None" = None
    why_cut: Cut | None = None
    paused_s: float = 0.0
    """Waited for a guest's closed gate, which says nothing of its speed."""

    def hear(self, *, now: float, pause_s: float) -> None:
        """A chunk came; a gap of more than `pause_s` before it was a pause."""
        gap_s, self.heard_s = now - self.heard_s, now
        if gap_s > pause_s:
            self.paused_s += gap_s

    def cut(self, why: Cut) -> None:
        if self.why_cut is None and self.task is not None and not self.task.done():
            self.why_cut = why
            self.task.cancel()


class TurnRunner:
    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        observer: TurnObserver,
        clock: Clock,
        *,
        timeouts: Timeouts,
        max_attempts: int,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._observer = observer
        self._clock = clock
        self._timeouts = timeouts
        self._max_attempts = max_attempts
        self._closing = False

    async def run(self, turn: Turn, *, on_tokens: Callable[[], None] | None) -> RefuseTurn | None:
        """Serve the turn to its end. A refusal is returned only where no token was made yet."""
        failures, resumed = 0, False
        while not turn.ended:
            if self._closing:
                turn.end(FinishReason.ABORT)
                return None
            placed = await self._dispatcher.place(turn, resumed=resumed)
            if isinstance(placed, RefuseTurn):
                turn.refuse()
                return None if turn.token_ids else placed
            failed = await self._attempt(turn, placed, on_tokens)
            failures += failed
            resumed = True
            if not turn.ended and failures >= self._max_attempts:
                turn.end(FinishReason.ABORT, lost=True)
        return None

    def close(self) -> None:
        """End every turn with what it has."""
        self._closing = True
        self._dispatcher.close()
        for member in self._fleet.members.values():
            for running in tuple(member.running):
                running.cut(Cut.END)

    async def watch_stalls(self) -> None:
        """Move turns off engines that fell silent; where nobody else has room they stay."""
        period_s = min(_WATCH_S, self._timeouts.guest_tail_stall_s / 4)
        while True:
            await asyncio.sleep(period_s)
            self._dispatcher.observe(QueueReviewed())
            for member in tuple(self._fleet.members.values()):
                for running in tuple(member.running):
                    if isinstance(running, RunningAttempt):
                        self._check_stall(member, running)

    def _check_stall(self, member: Member, running: RunningAttempt) -> None:
        silent_s = self._clock.now() - running.heard_s
        tail = not self._dispatcher.policy.queued_turns
        limit_s = self._timeouts.moved_after_s(member.engine.kind, tail=tail)
        if silent_s > self._timeouts.silence_s or (
            silent_s > limit_s and self._dispatcher.has_other_place(running.turn)
        ):
            running.cut(Cut.STALL)

    async def _attempt(
        self, turn: Turn, placed: DispatchTurn, on_tokens: Callable[[], None] | None
    ) -> bool:
        """One attempt on one engine. True if the engine failed under it."""
        now = self._clock.now()
        running = RunningAttempt(turn, began_s=now, heard_s=now)
        member = self._fleet.began(placed.engine, running)
        if member is None:
            self._dispatcher.leave(turn.key)
            return False
        attempt = turn.begin(engine=placed.engine, version=placed.version, numerics=member.numerics)
        before = len(turn.token_ids)
        try:
            running.task = asyncio.ensure_future(self._stream(attempt, running, member, on_tokens))
            return await self._outcome(turn, attempt, running, member)
        finally:
            tokens = len(turn.token_ids) - before
            self._observer.generated(turn, member, tokens)
            self._dispatcher.leave(
                turn.key,
                tokens=tokens,
                seconds=self._clock.now() - running.began_s - running.paused_s,
                stalled=running.why_cut is Cut.STALL,
            )
            self._fleet.ended(member, running)

    async def _outcome(
        self, turn: Turn, attempt: Attempt, running: RunningAttempt, member: Member
    ) -> bool:
        assert running.task is not None
        try:
            finished = await running.task
        except asyncio.CancelledError:
            if running.why_cut is None:
                running.task.cancel()
                raise
            turn.lose(attempt)
            if running.why_cut is Cut.END and not turn.ended:
                turn.end(FinishReason.ABORT)
            return running.why_cut in (Cut.STALL, Cut.ENGINE)
        except Stale:
            turn.lose(attempt)
            self._observer.lease_refused(member)
            return False
        except (EngineLost, Exhausted) as error:
            turn.lose(attempt)
            self._fleet.down(member, str(error))
            return isinstance(error, EngineLost)
        if finished is None:
            turn.lose(attempt)
        else:
            turn.end(finished)
        return finished is None

    async def _stream(
        self,
        attempt: Attempt,
        running: RunningAttempt,
        member: Member,
        on_tokens: Callable[[], None] | None,
    ) -> FinishReason | None:
        """How the engine finished; None if it aborted."""
        turn = running.turn
        epoch: Epoch | None = member.lease.epoch if member.lease else None
        choices = member.client.generate(
            attempt,
            request_id=turn.request.request_id,
            epoch=epoch,
            priority=turn.request.priority,
        )
        guest = member.engine.kind is EngineKind.GUEST
        pause_s = self._timeouts.guest_stall_s / 4 if guest else math.inf
        finish: str | None = None
        async with aclosing(choices):
            async for choice in choices:
                running.hear(now=self._clock.now(), pause_s=pause_s)
                if choice.token_ids:
                    logprobs = choice.logprobs.content if choice.logprobs else None
                    try:
                        turn.accept(attempt, choice.token_ids, logprobs or ())
                    except ValueError as error:
                        raise EngineLost(f"protocol: {error}") from error
                    if on_tokens is not None:
                        on_tokens()
                finish = choice.finish_reason or finish
        # Up to 0.30 vLLM ends the stream of an aborted request without a word where no token is
        # left to send with it.
        if finish in (None, "abort", "error"):
            return None
        return _FINISHED.get(finish, FinishReason.STOP)
