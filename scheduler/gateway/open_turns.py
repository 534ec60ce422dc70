"""The turns of one job that clients wait for, by request id.

A client that asks again, with the same body under the same id, joins the turn that it began: its
first connection may have timed out or broken. A turn outlives its last client by `rejoin_s`, and so
does an undelivered end; after that it is cancelled on its engine and forgotten.
Whole answers of requests that their clients named are given again for a while (answered_turns.py);
any other id whose turn has been answered is free. An aborted turn ends with its tokens so far, and
its clients get them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import RoseMuxError
from harvester.contracts.ids import TenantId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import GenerateRequest
from scheduler.gateway.policy.answered_turns import AnsweredTurns
from scheduler.gateway.policy.routing_events import RefuseTurn
from scheduler.gateway.policy.turn import FINISHED, Turn, turn_key
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.requests import ContextSampling
from scheduler.model import BASE_VERSION

Run = Callable[[Turn, Callable[[], None]], Coroutine[Any, Any, RefuseTurn | None]]
Listen = Callable[[Turn], Callable[[], None]]


class IdInUse(RoseMuxError):  # noqa: N818 - an answer, not a fault
    """Another request is being served, or was answered a moment ago, under this id."""


@dataclass(slots=True)
class ClientRequest:
    """The client's request that a turn is a part of, and its session, as the client names them.
    One object for all of its parts."""

    request: str
    session: TrajectoryId
    named: bool = False
    """Whether the client can send it again under this id."""
    aborted: str | None = None
    """The fault, or "", with which parts that have not begun end at once; None: they begin."""


@dataclass(slots=True, eq=False)
class _Open:
    turn: Turn
    part_of: ClientRequest
    listeners: list[Callable[[], None]] = field(default_factory=list)
    clients: int = 0
    task: "asyncio.Task[RefuseTurn | None] | None" = None
    forget: asyncio.TimerHandle | None = None
    abandoned: bool = False
    aborted: bool = False

    def hear(self) -> None:
        for listener in self.listeners:
            listener()

    def is_named(self, ids: Collection[str] | None, session: TrajectoryId | None) -> bool:
        names = {self.turn.request.request_id, self.part_of.request}
        return (ids is None or not names.isdisjoint(ids)) and session in (
            None,
            self.part_of.session,
        )


class OpenTurns:
    def __init__(
        self,
        ledger: TurnLedger,
        run: Run,
        clock: Clock,
        *,
        on_end: Callable[[Turn], None],
        rejoin_s: float,
        answered: AnsweredTurns,
        tenant: TenantId,
    ) -> None:
        """`answered`: shared by all jobs; the answers of this job are `tenant`'s."""
        self._ledger = ledger
        self._clock = clock
        self._answered = answered
        self._tenant = tenant
        self._clients: Counter[str] = Counter()
        """Number of waiting clients by request."""
        self._run = run
        self._on_end = on_end
        self._rejoin_s = rejoin_s
        self._open: dict[str, _Open] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open or turn_key(self._ledger.job, request_id) in self._answered

    async def serve(
        self,
        request: GenerateRequest,
        *,
        trajectory: TrajectoryId,
        on_turn: Listen | None,
        on_begin: Callable[[], None] = lambda: None,
        newest: WeightVersion = BASE_VERSION,
        part_of: ClientRequest | None = None,
    ) -> tuple[Turn, RefuseTurn | None]:
        """Returns the turn at its end. Raises IdInUse and the errors of `run`.

        `on_turn` gives a callback for new tokens; `on_begin` is called for a turn that is new. Its
        pin is resolved against `newest`.
        """
        while (held := self._open.get(request.request_id)) is not None:
            if not held.abandoned and _is_for(held.turn, request, trajectory):
                break
            if held.clients:
                raise IdInUse(
                    f"request_id {request.request_id!r} is being served with another body; "
                    "use a new id"
                )
            await self._cancel(held)
        key, now = turn_key(self._ledger.job, request.request_id), self._clock.now()
        if held is None and (turn := self._answered.find(key, now=now)) is not None:
            if not _is_for(turn, request, trajectory):
                raise IdInUse(
                    f"request_id {request.request_id!r} was answered with another body; use a new "
                    "id"
                )
            self._answered.given_again(key, now=now)
            self._ledger.counters.repeated += 1
            if on_turn is not None:
                on_turn(turn)
            return turn, None
        if held is None:
            on_begin()
            part_of = part_of or ClientRequest(request.request_id, trajectory)
            held = self._begin(request, trajectory, part_of, newest)
        return await self._follow(held, on_turn)

    async def abort(
        self,
        *,
        ids: Collection[str] | None = None,
        session: TrajectoryId | None = None,
        fault: str = "",
    ) -> int:
        """Ends open turns with their tokens so far; returns their number. Ignores unknown names.
        Parts of an aborted request that have not begun end as they begin.

        `ids`: names of turns or of the requests that they are parts of. `session`: of a trajectory.
        Without both, all turns. `fault`: why, where the job did not request it.
        """
        ending = []
        for held in self._open.values():
            if not held.is_named(ids, session):
                continue
            if ids is None or held.part_of.request in ids:
                held.part_of.aborted = fault
            if held.task and not held.task.done():
                held.turn.fault = fault
                held.aborted = held.task.cancel()
                ending.append(held.task)
        if ending:
            await asyncio.wait(ending)
        return len(ending)

    async def close(self) -> None:
        """Delivers ended turns to their clients, then closes all turns."""
        while self._open:
            await self._cancel(next(iter(self._open.values())))

    def _begin(
        self,
        request: GenerateRequest,
        trajectory: TrajectoryId,
        part_of: ClientRequest,
        newest: WeightVersion,
    ) -> _Open:
        turn = self._ledger.open(request, trajectory=trajectory, newest=newest)
        assert turn is not None, "every open turn is held here"
        held = self._open[request.request_id] = _Open(turn, part_of)
        held.task = asyncio.create_task(self._run(turn, held.hear))
        held.task.add_done_callback(lambda task: self._ended(held, task))
        if part_of.aborted is not None:
            turn.fault, held.aborted = part_of.aborted, held.task.cancel()
        return held

    def _ended(self, held: _Open, task: "asyncio.Task[RefuseTurn | None]") -> None:
        self._ledger.close(held.turn)
        self._on_end(held.turn)
        # Retrieves the error: a waiting client gets it, and without a client asyncio logs nothing.
        # A cancellation refers back to here, by the frames that it passed, and goes with this call.
        with suppress(asyncio.CancelledError):
            task.exception()
        if task.cancelled() or task.exception() is not None:
            self._forget(held)
        elif held.part_of.named and held.turn.finish_reason in FINISHED:
            request = self._request_of(held)
            self._answered.keep(held.turn, tenant=self._tenant, request=request)
            if not self._clients[request]:
                self._answered.left(self._tenant, request, now=self._clock.now())
            if held.turn.key in self._answered:
                self._forget(held)

    def _request_of(self, held: _Open) -> str:
        return turn_key(self._ledger.job, held.part_of.request)

    async def _follow(self, held: _Open, on_turn: Listen | None) -> tuple[Turn, RefuseTurn | None]:
        assert held.task is not None
        request = self._request_of(held)
        held.clients += 1
        self._clients[request] += 1
        if held.forget is not None:
            held.forget.cancel()
            held.forget = None
        listener = on_turn(held.turn) if on_turn is not None else None
        if listener is not None:
            held.listeners.append(listener)
            if held.turn.token_ids:
                listener()
        received = False
        try:
            await asyncio.wait((held.task,))
            received = True
            if held.aborted and held.task.cancelled():
                return held.turn, None
            return held.turn, held.task.result()
        finally:
            held.clients -= 1
            self._clients[request] -= 1
            if not self._clients[request]:
                del self._clients[request]
                self._answered.left(self._tenant, request, now=self._clock.now())
            if listener is not None:
                held.listeners.remove(listener)
            if received:
                self._forget(held)
                if not held.clients:
                    # The task's error refers back to here, by the frames that it passed.
                    held.task = None
            elif not held.clients:
                loop = asyncio.get_running_loop()
                held.forget = loop.call_later(self._rejoin_s, self._abandon, held)

    def _abandon(self, held: _Open) -> None:
        assert held.task is not None
        held.abandoned, held.forget = True, None
        if not held.task.cancel():
            # The turn's end may not be recorded yet: uvloop runs timers before callbacks.
            asyncio.get_running_loop().call_soon(self._forget, held)

    def _forget(self, held: _Open) -> None:
        if self._open.get(held.turn.request.request_id) is held:
            del self._open[held.turn.request.request_id]

    async def _cancel(self, held: _Open) -> None:
        assert held.task is not None
        if held.forget is not None:
            held.forget.cancel()
        held.task.cancel()
        await asyncio.gather(held.task, return_exceptions=True)
        self._forget(held)


def _is_for(turn: Turn, request: GenerateRequest, trajectory: TrajectoryId) -> bool:
    """Whether the request asks for this turn, in any form of reply. The context that filled in
    its `max_tokens` may be another one by now."""
    begun, sampling = turn.request, request.sampling_params
    if isinstance(sampling, ContextSampling) and isinstance(begun.sampling_params, ContextSampling):
        sampling = msgspec.structs.replace(sampling, max_tokens=begun.sampling_params.max_tokens)
    again = msgspec.structs.replace(request, stream=begun.stream, sampling_params=sampling)
    return again == turn.request and trajectory == turn.trajectory
