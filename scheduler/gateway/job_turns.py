"""The turns that jobs request: admitted, served or joined, aborted, and refused to an older run."""

import math
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress

from harvester.contracts.clock import Clock
from harvester.contracts.ids import JobId, TenantId, TrajectoryId
from harvester.contracts.wire.rollouts import GenerateRequest
from scheduler.gateway.dispatch import Dispatcher, context_tokens
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.gateway_metrics import GatewayMetrics
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.open_turns import ClientRequest, Listen, OpenTurns
from scheduler.gateway.policy.answered_turns import AnsweredTurns
from scheduler.gateway.policy.routing_events import Refusal, RefuseTurn, TrajectoryEnded
from scheduler.gateway.policy.turn import Turn, turn_key
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.samples import TurnRefused
from scheduler.gateway.settings import Timeouts
from scheduler.gateway.turn_runner import TurnRunner


class JobTurns:
    def __init__(
        self,
        ledgers: Mapping[JobId, TurnLedger],
        fleet: EngineFleet,
        runner: TurnRunner,
        dispatcher: Dispatcher,
        answered: AnsweredTurns,
        state: SchedulerState,
        metrics: GatewayMetrics,
        clock: Clock,
        times: Timeouts,
    ) -> None:
        self._versions = fleet.policy
        self._dispatcher = dispatcher
        self._answered = answered
        self._state = state
        self._metrics = metrics
        self._other_runs = state.other_runs()
        """Why turns are refused, of each job whose trainer began anew: engines hold weights of the
        run before. Until a publish is taken."""
        self._open = {
            job: OpenTurns(
                ledger,
                runner.run,
                metrics,
                clock,
                rejoin_s=times.rejoin_s,
                answered=answered,
                tenant=TenantId(fleet.registry.jobs[job].tenant),
            )
            for job, ledger in ledgers.items()
        }

    async def generate(
        self,
        job: JobId,
        trajectory: TrajectoryId,
        request: GenerateRequest,
        *,
        on_turn: Listen | None = None,
        part_of: ClientRequest | None = None,
    ) -> tuple[Turn, RefuseTurn | None]:
        """Serve one turn to its end, or join it where the job asked for the same before.

        A cancelled call leaves the turn for `rejoin_s`, then it is aborted on its engine. Raises
        TurnRefused where engines hold weights of an earlier run of the job's trainer.
        """
        reason = self._other_runs.get(job)
        if reason and (part_of is None or part_of.aborted is None):
            key = turn_key(job, request.request_id)
            raise TurnRefused(RefuseTurn(turn=key, refusal=Refusal.VERSION, reason=reason))
        return await self._open[job].serve(
            request,
            trajectory=trajectory,
            on_turn=on_turn,
            newest=self._versions.newest(job),
            part_of=part_of,
        )

    def admitting(
        self, job: JobId, requests: Sequence[GenerateRequest]
    ) -> AbstractContextManager[None]:
        """Reserves queue room for all new turns of a request (joined turns need none). Raises
        Pressure, and TurnRefused if a turn fits no engine, before any sample begins.

        Routing itself decides on a single turn, which may find a free engine.
        """
        if len(requests) == 1:
            return nullcontext()
        held = self._open[job]
        new = [each for each in requests if each.request_id not in held]
        longest = max(map(context_tokens, new), default=0)
        if reason := self._dispatcher.policy.too_long(job, longest):
            turn = turn_key(job, new[0].request_id)
            raise TurnRefused(RefuseTurn(turn=turn, refusal=Refusal.CONTEXT, reason=reason))
        return self._dispatcher.admitting([turn_key(job, each.request_id) for each in new])

    async def abort(self, job: JobId, ids: Collection[str] | None) -> int:
        """Ends the job's open turns with these names (None: all) with their tokens so far."""
        return await self._open[job].abort(ids=ids)

    async def end_trajectory(self, job: JobId, trajectory: TrajectoryId) -> int:
        """Aborts the open turns of a trajectory and forgets where its prefix is; returns the number
        of aborted turns."""
        aborted = await self._open[job].abort(session=trajectory)
        self._metrics.trajectory_ended(job, trajectory)
        self._dispatcher.observe(TrajectoryEnded(job=job, trajectory=trajectory))
        return aborted

    async def end_run(self, job: JobId, why: str) -> None:
        """Aborts the job's open turns, and refuses new ones until `begin_run`."""
        self._other_runs[job] = why
        with suppress(sqlite3.Error):  # The process refuses them without it.
            self._state.refuse_turns(job, why)
        self._answered.expire(now=math.inf)  # The new run may give its requests the same names.
        await self._open[job].abort(fault=why)

    def begin_run(self, job: JobId) -> None:
        """Takes turns again: the engines get this run's weights."""
        self._other_runs.pop(job, None)

    async def close(self) -> None:
        """Ends open turns with their tokens so far."""
        async with AsyncExitStack() as steps:
            for open_turns in self._open.values():
                steps.push_async_callback(open_turns.close)
