"""The scheduler of one gateway, put together: policies, their shells, durable state, metrics."""

import asyncio
import math
import secrets
from collections.abc import Collection, Coroutine, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from typing import Any

import aiohttp
import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import EngineId, JobId, SlotId, TenantId, TrajectoryId
from harvester.contracts.wire.engines import EngineDescription
from harvester.contracts.wire.rollouts import GenerateRequest, OnInterrupt
from harvester.contracts.wire.stops import StopOrder
from harvester.platform.tls import Credentials
from scheduler.decision_log import DecisionLog
from scheduler.gateway.capacity.agent_client import AgentClient
from scheduler.gateway.capacity.harvested_slots import HarvestedSlots
from scheduler.gateway.dialects.renderer import RenderEndpoint, Renderer
from scheduler.gateway.dispatch import Dispatcher, context_tokens
from scheduler.gateway.engine_fleet import EngineFleet, dedicated_places
from scheduler.gateway.engine_probing import EngineProbing
from scheduler.gateway.engines.engine_client import EngineClient
from scheduler.gateway.engines.engine_connections import EngineConnections
from scheduler.gateway.gateway_metrics import GatewayMetrics
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.job_pauses import PauseControl, PauseMode
from scheduler.gateway.job_switches import JobSwitches, Switch
from scheduler.gateway.job_versions import JobVersions
from scheduler.gateway.open_turns import ClientRequest, Listen, OpenTurns
from scheduler.gateway.policy.answered_turns import AnswerBounds, AnsweredTurns
from scheduler.gateway.policy.capacity import CapacityConfig, CapacityPolicy, Demand
from scheduler.gateway.policy.routing import RoutingPolicy
from scheduler.gateway.policy.routing_events import (
    ForgetPrefix,
    Refusal,
    RefuseTurn,
    RoutingConfig,
    TrajectoryEnded,
)
from scheduler.gateway.policy.turn import Turn, turn_key
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.policy.versions import VersionPolicy
from scheduler.gateway.policy.versions_events import VersionsConfig
from scheduler.gateway.request_blame import RequestBlame
from scheduler.gateway.samples import TurnRefused
from scheduler.gateway.settings import AgentSettings, GatewayJobSettings, GatewaySettings
from scheduler.gateway.turn_runner import TurnRunner
from scheduler.gateway.version_staging import VersionStaging
from scheduler.model import Engine, EngineKind

_EXPIRED_S = 0.25
"""Period of checks for expired switches and answers, and of retries of failed records, in s."""


class Scheduler:
    def __init__(
        self,
        settings: GatewaySettings,
        clock: Clock,
        state: SchedulerState,
        session: aiohttp.ClientSession,
    ) -> None:
        self.settings = settings
        self.metrics = GatewayMetrics()
        self.state = state
        self._clock = clock
        self._session = session
        times = settings.timeouts
        self._renderers = [
            EngineConnections(given.url, connect_s=times.connect_s, credentials=given)
            for given in settings.renderers
        ]
        self.renderer = Renderer(self._renderer_peers, times)
        self._tasks: list[asyncio.Future[None]] = []
        self.jobs: dict[JobId, GatewayJobSettings] = {JobId(job.id): job for job in settings.jobs}
        self.ledgers = {job: TurnLedger(job) for job in self.jobs}
        self._harvesting = {job: given.harvesting for job, given in self.jobs.items()}
        self.switches = JobSwitches(state, clock, self._switched)
        moved = {"moved_after_s": settings.timeouts.guest_stall_s}
        routing = RoutingPolicy(msgspec.convert(moved | settings.routing, RoutingConfig))
        self._policy_fault: asyncio.Future[None] | None = None
        self.capacity_wake = asyncio.Event()
        """Set where something changed that leases depend on."""
        self.dispatcher = Dispatcher(
            routing,
            clock,
            queue_s=times.queue_s,
            waits_for_permit=lambda job: not self.fleet.may_use_dedicated(job),
            fault_for=lambda job: next(iter(self.versions.faults(job)), ""),
            on_queued=self.capacity_wake.set,
            on_forgotten=self._forget_prefix,
            on_fault=self._fail,
        )
        versions_config = {
            "min_dedicated": int(any(e.kind is EngineKind.DEDICATED for e in settings.engines)),
            **settings.versions,
        }
        versions = VersionPolicy.from_config(versions_config)
        self._versions_log = self._log(versions, msgspec.convert(versions_config, VersionsConfig))
        self.blame = blame = RequestBlame()
        self.fleet = EngineFleet(
            versions,
            self.dispatcher,
            blame,
            self._versions_log,
            self.metrics,
            clock,
            update_s=times.update_s,
            adapter_of=lambda job: self.jobs[job].adapter,
            leasable=self._leasable,
            on_fault=self._fail,
        )
        self.harvest = self._make_slots()
        self.probing = EngineProbing(self.fleet, blame, clock)
        self.runner = TurnRunner(
            self.fleet,
            self.probing,
            self.dispatcher,
            blame,
            self.metrics,
            clock,
            timeouts=times,
            max_attempts=settings.max_attempts,
            returns_partial=self._returns_partial,
            on_lease_refused=self.harvest.refused,
        )
        self.pauses = PauseControl(self.fleet, self.dispatcher, clock)
        self.answered = AnsweredTurns(AnswerBounds(**settings.answers.model_dump()))
        self._open_turns = {
            job: OpenTurns(
                ledger,
                self.runner.run,
                self.metrics,
                clock,
                rejoin_s=times.rejoin_s,
                answered=self.answered,
                tenant=TenantId(self.jobs[job].tenant),
            )
            for job, ledger in self.ledgers.items()
        }
        staging = VersionStaging(self.fleet, self.metrics, clock, stage_s=times.stage_s)
        self.versions = JobVersions(
            self.jobs,
            self.fleet,
            staging,
            state,
            clock,
            publish_s=times.publish_s,
            on_activated=self.capacity_wake.set,
            on_other_run=self._end_run,
        )

    def _make_slots(self) -> HarvestedSlots:
        settings = self.settings
        config = {"instance": f"gateway-{secrets.token_hex(12)}", **settings.capacity}
        policy = CapacityPolicy.from_config(config)
        self._capacity_log = self._log(policy, msgspec.convert(config, CapacityConfig))
        return HarvestedSlots(
            policy,
            self.fleet,
            self.state,
            self._capacity_log,
            self._clock,
            wake=self.capacity_wake,
            agents={agent.id: self._agent(agent) for agent in settings.agents},
            guests={SlotId(e.slot): e for e in settings.engines if e.slot is not None},
            client_of=self._engine_client,
            credentials={agent.id: agent.guests for agent in settings.agents},
            demands=self.demands,
            tenant_of=lambda job: TenantId(self.jobs[job].tenant),
        )

    def reconfigure(self, given: GatewaySettings) -> tuple[list[str], tuple[str, ...]]:
        """Takes over what a running gateway can, and returns the agents that came and the fields
        that need a restart."""
        merged, waiting = self.settings.with_new(given)
        new = [agent for agent in merged.agents if agent not in self.settings.agents]
        self.settings = merged
        for agent in new:
            self.harvest.add_agent(agent.id, self._agent(agent), agent.guests)
        return [agent.id for agent in new], waiting

    def _renderer_peers(self) -> list[RenderEndpoint]:
        """The configured renderers; without any, the dedicated engines that are up, the longest
        context first. Raises Exhausted without an engine."""
        members = self.fleet.members.values()
        engines = [each for each in members if each.engine.kind is EngineKind.DEDICATED]
        if not (self._renderers or engines):
            raise Exhausted(
                "text cannot be rendered: no renderer or dedicated engine is configured"
            )
        longest = max((each.context_tokens for each in engines), default=0)
        engines.sort(key=lambda each: -each.context_tokens)
        return [RenderEndpoint(each) for each in self._renderers] or [
            RenderEndpoint(
                each.client.connections,
                short_tokens=each.context_tokens if each.context_tokens < longest else 0,
            )
            for each in engines
            if each.up
        ]

    def _log(self, policy: Any, config: msgspec.Struct) -> DecisionLog:
        return DecisionLog(
            self.settings.journal_dir,
            policy,
            msgspec.to_builtins(config),
            max_bytes=self.settings.journal_max_bytes,
            now=self._clock.now(),
        )

    def _engine_client(self, url: str, credentials: Credentials) -> EngineClient:
        connect_s = self.settings.timeouts.connect_s
        return EngineClient(self._session, url, connect_s=connect_s, credentials=credentials)

    def _agent(self, agent: AgentSettings) -> AgentClient:
        timeout_s = self.settings.timeouts.agent_s
        return AgentClient(
            self._session,
            agent.url,
            timeout_s=timeout_s,
            credentials=agent,
            prefix=self.settings.slot_prefix(agent.id),
        )

    async def start(self) -> None:
        """Resume the state of the previous process, then watch engines, stalls and agents."""
        self._resume()
        times = self.settings.timeouts
        for given in self.settings.engines:
            if given.kind is EngineKind.DEDICATED:
                self.fleet.add(
                    Engine(
                        engine=EngineId(given.id),
                        kind=given.kind,
                        url=given.url,
                        concurrency=given.concurrency,
                        numerics=given.numerics,
                    ),
                    self._engine_client(given.url, given),
                )
        loops: list[Coroutine[Any, Any, None]] = [
            self.probing.run(period_s=times.health_s),
            self.runner.stalls.run(),
            self._watch_expired(),
        ]
        if self.settings.agents:
            loops.append(self.harvest.run(period_s=self.settings.capacity_period_s))
        self._policy_fault = asyncio.get_running_loop().create_future()
        self._tasks = [*map(asyncio.create_task, loops), self._policy_fault]

    def _resume(self) -> None:
        for job in self.state.parked():
            self.fleet.use_dedicated(job, enabled=False)
        for job, facts in self.state.jobs().items():
            if job in self.jobs and facts.harvesting is not None:
                self._harvesting[job] = facts.harvesting
        self.versions.resume()

    def _leasable(self) -> list[EngineDescription]:
        return self.harvest.leasable()

    def _forget_prefix(self, effect: ForgetPrefix) -> None:
        self.fleet.forget_prefix(effect)

    def _fail(self, error: Exception) -> None:
        """An error of a policy: turns that it had placed would wait for ever."""
        if self._policy_fault is not None and not self._policy_fault.done():
            self._policy_fault.set_exception(error)

    async def failed(self) -> None:
        """Returns never; raises what stopped one of the loops, which must all go on, or a policy's
        error."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self) -> None:
        """Ends open turns with their tokens so far and gives leases back."""
        async with AsyncExitStack() as steps:
            # The last one first; each is taken although one before it has failed.
            for close in (self.state.close, self._capacity_log.close, self._versions_log.close):
                steps.callback(close)
            steps.push_async_callback(self.fleet.close)
            for renderer in self._renderers:
                steps.callback(renderer.close)
            steps.push_async_callback(self.harvest.release_all)
            steps.push_async_callback(self._end_loops)
            for open_turns in self._open_turns.values():
                steps.push_async_callback(open_turns.close)
            steps.callback(self.runner.close)

    async def _end_loops(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
        reason = self.versions.other_runs.get(job)
        if reason and (part_of is None or part_of.aborted is None):
            key = turn_key(job, request.request_id)
            raise TurnRefused(RefuseTurn(turn=key, refusal=Refusal.VERSION, reason=reason))
        return await self._open_turns[job].serve(
            request,
            trajectory=trajectory,
            on_turn=on_turn,
            newest=self.versions.newest(job),
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
        held = self._open_turns[job]
        new = [each for each in requests if each.request_id not in held]
        longest = max(map(context_tokens, new), default=0)
        if reason := self.dispatcher.policy.too_long(job, longest):
            turn = turn_key(job, new[0].request_id)
            raise TurnRefused(RefuseTurn(turn=turn, refusal=Refusal.CONTEXT, reason=reason))
        return self.dispatcher.admitting([turn_key(job, each.request_id) for each in new])

    async def abort(self, job: JobId, ids: Collection[str] | None) -> int:
        """Ends the job's open turns with these names (None: all) with their tokens so far."""
        return await self._open_turns[job].abort(ids=ids)

    async def _end_run(self, job: JobId, why: str) -> None:
        self.answered.expire(now=math.inf)  # The new run may give its requests the same names.
        await self._open_turns[job].abort(fault=why)

    async def pause(self, job: JobId, mode: PauseMode, *, for_s: float | None = None) -> None:
        """Begins no turn of the job, until it is resumed or `for_s` have passed without another
        call. A restarted gateway is not paused."""
        self.pauses.begin(job, for_s=math.inf if for_s is None else for_s)
        if mode is PauseMode.ABORT:
            await self.abort(job, None)
        else:
            await self.pauses.emptied(job, cut=mode is PauseMode.KEEP)

    def resume(self, job: JobId) -> None:
        self.pauses.end(job)

    def is_paused(self, job: JobId) -> bool:
        return self.pauses.is_paused(job)

    async def end_trajectory(self, job: JobId, trajectory: TrajectoryId) -> int:
        """Aborts the open turns of a trajectory and forgets where its prefix is; returns the number
        of aborted turns."""
        aborted = await self._open_turns[job].abort(session=trajectory)
        self.metrics.trajectory_ended(job, trajectory)
        self.dispatcher.observe(TrajectoryEnded(job=job, trajectory=trajectory))
        return aborted

    def uses_engines(self, job: JobId) -> bool:
        """Whether it has turns on engines or in line for them. A turn that is deferred for its
        pin, or waits for the end of a pause, uses none, however long it waits."""
        routing = self.dispatcher.policy
        queued = not routing.is_paused(job) and routing.queued_turns_of(job)
        return bool(routing.open_turns_of(job) or queued)

    def model_names(self, job: JobId) -> set[str]:
        """Model names that a request of the job may use. The base of its adapter is none of them,
        since engines answer with the adapter."""
        adapter = self.jobs[job].adapter
        return {job, adapter} if adapter else {job, *self.fleet.models()}

    def may_meet_other_models(self, job: JobId) -> bool:
        """Whether no engine's model is known yet, though there are engines to come."""
        known = self.jobs[job].adapter or self.fleet.models()
        return not known and bool(self.fleet.members or self.settings.agents)

    def _switched(self, job: JobId, switch: Switch, on: bool) -> None:
        match switch:
            case Switch.HARVESTING:
                self._harvesting[job] = on
            case Switch.DEDICATED:
                self.fleet.use_dedicated(job, enabled=on)
        self.capacity_wake.set()

    def unrecorded(self) -> list[str]:
        """Nouns for the facts that journals and state file lack now."""
        lacking = {
            "budgets": self.harvest.budgets.fault,
            "decisions": self._versions_log.fault or self._capacity_log.fault,
            "leases": self.harvest.unrecorded,
            "stops": self.harvest.stops.unrecorded,
            "switches": self.switches.unrecorded,
        }
        return [noun for noun, fault in lacking.items() if fault]

    def missing_decisions(self) -> int:
        """Decisions without a line in a journal."""
        return self._versions_log.missing_total + self._capacity_log.missing_total

    def harvesting(self, job: JobId) -> bool:
        return self._harvesting[job]

    def demands(self) -> tuple[Demand, ...]:
        target, routing = self.fleet.policy.target, self.dispatcher.policy
        active = target.job if target else None
        places = dedicated_places(self.fleet)
        return tuple(
            Demand(
                job=job,
                active=job == active,
                harvesting=self._harvesting[job] and not self._drained(job),
                queued=0 if routing.is_paused(job) else routing.queued_turns_of(job),
                running=routing.open_turns_of(job),
                dedicated_places=places if self.fleet.may_use_dedicated(job) else 0,
                dispatched=dict(self.dispatcher.dispatched) if job == active else {},
                s_per_token=routing.speeds() if job == active else {},
            )
            for job in self.jobs
        )

    def _drained(self, job: JobId) -> bool:
        tenant = TenantId(self.jobs[job].tenant)
        return self.harvest.stops.order_for(tenant) is StopOrder.DRAIN

    def _returns_partial(self, turn: Turn) -> bool:
        own = turn.request.on_interrupt
        return (own or self.jobs[turn.job].on_interrupt) is OnInterrupt.RETURN_PARTIAL

    async def _watch_expired(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRED_S)
            now = self._clock.now()
            self.answered.expire(now=now)
            self.switches.expire(now=now)
            self.pauses.expire(now=now)
            self._versions_log.look(now=now)
            self._capacity_log.look(now=now)
