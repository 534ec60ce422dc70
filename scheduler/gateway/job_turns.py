"""The turns of one job, by request id: admitted, served or joined, aborted.

A client that asks again, with the same body under the same id, joins the turn that it began: its
first connection may have timed out or broken. A turn outlives its last client by `rejoin_s`, and so
does an undelivered end; after that it is cancelled on its engine and forgotten.
Whole answers of requests that their clients named are given again for a while (answered_turns.py);
any other id whose turn has been answered is free. An aborted turn ends with its tokens so far, and
its clients get them.
"""

import asyncio
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import RoseMuxError
from harvester.contracts.ids import TenantId, TrajectoryId
from harvester.contracts.wire.rollouts import GenerateRequest
from scheduler.gateway.dispatch import Dispatcher, context_tokens
from scheduler.gateway.engine_registry import EngineRegistry
from scheduler.gateway.gateway_metrics import GatewayMetrics
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.policy.answered_turns import AnsweredTurns
from scheduler.gateway.policy.routing_events import Refusal, RefuseTurn, TrajectoryEnded
from scheduler.gateway.policy.turn import FINISHED, Turn, turn_key
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.requests import ContextSampling
from scheduler.gateway.turn_runner import TurnRunner

Listen = Callable[[Turn], Callable[[], None]]
_Name = tuple[bool, str]
"""Whether it is an id, and not a session's name; the name."""
_REFUSED_STATUS = {
    Refusal.VERSION: 409,
    Refusal.GONE: 410,
    Refusal.REQUEST: 422,
    Refusal.CONTEXT: 400,
    Refusal.JOB: 503,
    Refusal.UNSERVED: 503,
    Refusal.FULL: 429,
}


class TurnRefused(RoseMuxError):  # noqa: N818 - an answer, not a fault
    def __init__(self, refused: RefuseTurn) -> None:
        super().__init__(refused.reason)
        self.status = _REFUSED_STATUS[refused.refusal]


class IdInUse(RoseMuxError):  # noqa: N818 - an answer, not a fault
    """The id names a request that is being served, or was answered a moment ago."""

    is_final = True


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

    @property
    def names(self) -> "set[_Name]":
        ids = {self.turn.request.request_id, self.part_of.request}
        return {(True, each) for each in ids} | {(False, self.part_of.session)}


class JobTurns:
    def __init__(
        self,
        ledger: TurnLedger,
        runner: TurnRunner,
        registry: EngineRegistry,
        dispatcher: Dispatcher,
        answered: AnsweredTurns,
        state: SchedulerState,
        metrics: GatewayMetrics,
        clock: Clock,
        *,
        rejoin_s: float,
    ) -> None:
        """`answered`: shared by all jobs."""
        self._job = ledger.job
        self._ledger = ledger
        self._runner = runner
        self._versions = registry.versions
        self._dispatcher = dispatcher
        self._clock = clock
        self._answered = answered
        self._tenant = TenantId(registry.jobs[ledger.job].tenant)
        self._state = state
        self._other_run = state.other_runs().get(ledger.job, "")
        """Why turns are refused until a publish is taken: the job's trainer began another run, and
        engines hold weights of the earlier one."""
        self.unrecorded = False
        self._clients: Counter[str] = Counter()
        """Number of waiting clients by request."""
        self._metrics = metrics
        self._rejoin_s = rejoin_s
        self._open: dict[str, _Open] = {}
        self._named: defaultdict[_Name, dict[_Open, None]] = defaultdict(dict)
        """Open turns by each name under which they may be aborted: a job ends thousands of turns
        and sessions one by one."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open or turn_key(self._job, request_id) in self._answered

    async def serve(
        self,
        request: GenerateRequest,
        *,
        trajectory: TrajectoryId,
        on_turn: Listen | None = None,
        part_of: ClientRequest | None = None,
    ) -> tuple[Turn, RefuseTurn | None]:
        """Returns the turn at its end. `on_turn` gives a callback for new tokens.

        A cancelled call leaves the turn for `rejoin_s`, then it is aborted on its engine. Raises
        IdInUse, the errors of the runner, and TurnRefused where engines hold weights of an earlier
        run of the job's trainer.
        """
        key = turn_key(self._job, request.request_id)
        if self._other_run and (part_of is None or part_of.aborted is None):
            reason = self._other_run
            raise TurnRefused(RefuseTurn(turn=key, refusal=Refusal.VERSION, reason=reason))
        part_of = part_of or ClientRequest(request.request_id, trajectory)
        while (held := self._open.get(request.request_id)) is not None:
            # `g.0` may be a request of its own, and the first sample of `g`.
            same = held.part_of.request == part_of.request
            if same and not held.abandoned and _is_for(held.turn, request, trajectory):
                break
            if held.clients:
                raise IdInUse(
                    f"request_id {request.request_id!r} is being served with another body; "
                    "use a new id"
                )
            await self._cancel(held)
        now = self._clock.now()
        if held is None and (found := self._answered.find(key, now=now)) is not None:
            turn, name = found
            same = name == turn_key(self._job, part_of.request)
            if not (same and _is_for(turn, request, trajectory)):
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
            self._metrics.trajectory_began(self._job, trajectory)
            held = self._begin(request, trajectory, part_of)
        return await self._follow(held, on_turn)

    def admitting(self, requests: Sequence[GenerateRequest]) -> AbstractContextManager[None]:
        """Reserves queue room for all new turns of a request (joined turns need none). Raises
        Pressure, and TurnRefused if a turn fits no engine, before any sample begins.

        Routing itself decides on a single turn, which may find a free engine.
        """
        if len(requests) == 1:
            return nullcontext()
        new = [each for each in requests if each.request_id not in self]
        keys = [turn_key(self._job, each.request_id) for each in new]
        longest = max(map(context_tokens, new), default=0)
        if reason := self._dispatcher.policy.too_long(self._job, longest):
            raise TurnRefused(RefuseTurn(turn=keys[0], refusal=Refusal.CONTEXT, reason=reason))
        return self._dispatcher.admitting(keys)

    async def end_trajectory(self, trajectory: TrajectoryId) -> int:
        """Aborts the open turns of a trajectory and forgets where its prefix is; returns the number
        of aborted turns."""
        aborted = await self.abort(session=trajectory)
        self._metrics.trajectory_ended(self._job, trajectory)
        self._dispatcher.observe(TrajectoryEnded(job=self._job, trajectory=trajectory))
        return aborted

    async def end_run(self, why: str) -> None:
        """Aborts all open turns, and refuses new ones until `begin_run`."""
        self._other_run = why
        self.record_refusal()
        self._answered.forget(self._job)  # The new run may give its requests the same names.
        await self.abort(fault=why)

    def record_refusal(self) -> None:
        """Records the refusal for the next process; call again while `unrecorded` is true."""
        self.unrecorded = True
        with suppress(sqlite3.Error):
            self._state.refuse_turns(self._job, self._other_run)
            self.unrecorded = False

    def begin_run(self) -> None:
        """Takes turns again: the engines get this run's weights."""
        self._other_run, self.unrecorded = "", False

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
        for held in self._found(ids, session):
            if ids is None or held.part_of.request in ids:
                held.part_of.aborted = fault
            if held.task and not held.task.done():
                held.turn.fault = fault
                held.aborted = held.task.cancel()
                ending.append(held.task)
        if ending:
            await asyncio.wait(ending)
        return len(ending)

    def _found(self, ids: Collection[str] | None, session: TrajectoryId | None) -> Iterable[_Open]:
        if ids is None and session is None:
            return tuple(self._open.values())
        names = [(False, session or "")] if ids is None else [(True, each) for each in ids]
        found = dict.fromkeys(chain.from_iterable(self._named.get(name, ()) for name in names))
        return [held for held in found if session in (None, held.part_of.session)]

    async def close(self) -> None:
        """Delivers ended turns to their clients, then closes all turns."""
        while self._open:
            await self._cancel(next(iter(self._open.values())))

    def _begin(
        self, request: GenerateRequest, trajectory: TrajectoryId, part_of: ClientRequest
    ) -> _Open:
        newest = self._versions.newest(self._job)
        turn = self._ledger.open(request, trajectory=trajectory, newest=newest)
        assert turn is not None, "every open turn is held here"
        held = self._open[request.request_id] = _Open(turn, part_of)
        for name in held.names:
            self._named[name][held] = None
        held.task = asyncio.create_task(self._runner.run(turn, held.hear))
        held.task.add_done_callback(lambda task: self._ended(held, task))
        if part_of.aborted is not None:
            turn.fault, held.aborted = part_of.aborted, held.task.cancel()
        return held

    def _ended(self, held: _Open, task: "asyncio.Task[RefuseTurn | None]") -> None:
        self._ledger.close(held.turn)
        self._metrics.turn_ended(held.turn)
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
        return turn_key(self._job, held.part_of.request)

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
        if self._open.get(held.turn.request.request_id) is not held:
            return
        del self._open[held.turn.request.request_id]
        for name in held.names:
            del self._named[name][held]
            if not self._named[name]:
                del self._named[name]

    async def _cancel(self, held: _Open) -> None:
        assert held.task is not None
        held.abandoned = True  # Its own client may come back meanwhile, and must not join it.
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
