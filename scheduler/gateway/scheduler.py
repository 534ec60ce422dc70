"""The scheduler of one gateway, put together: policies, their shells, durable state, metrics."""

import asyncio
import secrets
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import aiohttp
import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.ids import EngineId, JobId, SlotId
from harvester.platform.decision_journal import JournalledPolicy
from scheduler.decision_log import DecisionLog
from scheduler.gateway.capacity.agent_client import AgentClient
from scheduler.gateway.capacity.agent_offers import AgentOffers
from scheduler.gateway.capacity.cluster_stops import ClusterStops
from scheduler.gateway.capacity.harvested_slots import HarvestedSlots
from scheduler.gateway.capacity.job_demands import JobDemands
from scheduler.gateway.dialects.renderer import RenderEndpoints, Renderer
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.engine_probing import EngineProbing
from scheduler.gateway.engine_registry import EngineRegistry
from scheduler.gateway.engines.engine_client import EngineClient, LargeReplies
from scheduler.gateway.gateway_metrics import GatewayMetrics
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.job_pauses import JobPauses
from scheduler.gateway.job_switches import JobSwitches
from scheduler.gateway.job_turns import JobTurns
from scheduler.gateway.job_versions import JobVersions
from scheduler.gateway.policy.answered_turns import AnsweredTurns
from scheduler.gateway.policy.capacity import CapacityConfig, CapacityPolicy
from scheduler.gateway.policy.routing import RoutingPolicy
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.policy.versions import VersionPolicy
from scheduler.gateway.request_blame import RequestBlame
from scheduler.gateway.settings import AgentSettings, GatewaySettings
from scheduler.gateway.turn_runner import TurnRunner
from scheduler.gateway.version_staging import VersionStaging
from scheduler.model import Engine

_EXPIRED_S = 0.25
"""Period of checks for expired switches and answers, and of retries of failed records, in s."""


class Scheduler:
    """Each part is given the parts that it stands on. Leases depend on many: these set `wake`."""

    def __init__(
        self,
        settings: GatewaySettings,
        clock: Clock,
        state: SchedulerState,
        session: aiohttp.ClientSession,
    ) -> None:
        self.settings, self.state = settings, state
        self._clock, self._session = clock, session
        self._tasks: list[asyncio.Future[None]] = []
        self._policy_fault: asyncio.Future[None] | None = None
        times, self.wake = settings.timeouts, asyncio.Event()
        self.engine_client = partial(
            EngineClient, session, connect_s=times.connect_s, large=LargeReplies()
        )
        self.metrics, self.blame = metrics, blame = GatewayMetrics(), RequestBlame()
        self.jobs = {JobId(job.id): job for job in settings.jobs}
        self.ledgers = {job: TurnLedger(job) for job in self.jobs}

        versions = VersionPolicy(settings.versions_config)
        self._versions_log = log = self._log(versions, settings.versions_config)
        self.offers = self._offers()
        self.registry = registry = EngineRegistry(versions, self.jobs, self.offers)
        routing, queue_s = RoutingPolicy(settings.routing_config), times.queue_s
        self.dispatcher = dispatcher = Dispatcher(
            routing, registry, clock, queue_s=queue_s, queued=self.wake, on_fault=self._fail
        )
        self.fleet = fleet = EngineFleet(
            registry, dispatcher, blame, log, metrics, clock, times.update_s, on_fault=self._fail
        )
        self.switches = JobSwitches(fleet, state, clock, wake=self.wake)
        self.stops = ClusterStops(state, self.offers.agents)
        self.demands = JobDemands(registry, dispatcher, self.switches, self.stops)
        self.harvest = self._harvested_slots()
        self.probing = probing = EngineProbing(fleet, blame, clock)
        self.runner = runner = TurnRunner(
            fleet,
            probing,
            dispatcher,
            blame,
            metrics,
            clock,
            timeouts=times,
            max_attempts=settings.max_attempts,
            on_lease_refused=self.harvest.refused,
        )
        self.answered = AnsweredTurns(settings.answer_bounds)
        shared = runner, registry, dispatcher, self.answered, state, metrics, clock
        self.turns = {
            job: JobTurns(ledger, *shared, rejoin_s=times.rejoin_s)
            for job, ledger in self.ledgers.items()
        }
        self.pauses = JobPauses(fleet, self.turns, dispatcher, clock)
        staging = VersionStaging(fleet, metrics, clock, stage_s=times.stage_s)
        self.versions = JobVersions(
            fleet, staging, self.turns, state, clock, publish_s=times.publish_s, wake=self.wake
        )
        self._render = RenderEndpoints(settings.renderers, registry, connect_s=times.connect_s)
        self.renderer = Renderer(self._render, times)

    def _offers(self) -> AgentOffers:
        settings = self.settings
        return AgentOffers(
            {agent.id: self._agent(agent) for agent in settings.agents},
            {agent.id: agent.guests for agent in settings.agents},
            {SlotId(each.slot): each for each in settings.engines if each.slot is not None},
        )

    def _harvested_slots(self) -> HarvestedSlots:
        # Part of the ids of its lease requests: no other gateway's, and not guessable.
        instance = f"gateway-{secrets.token_hex(12)}"
        config = msgspec.convert({"instance": instance, **self.settings.capacity}, CapacityConfig)
        policy = CapacityPolicy(config)
        self._capacity_log = self._log(policy, config)
        return HarvestedSlots(
            policy,
            self.fleet,
            self.offers,
            self.stops,
            self.demands,
            self.state,
            self._capacity_log,
            self._clock,
            wake=self.wake,
            client_of=self.engine_client,
        )

    def _log(self, policy: JournalledPolicy, config: msgspec.Struct) -> DecisionLog:
        return DecisionLog(
            self.settings.journal_dir,
            policy,
            msgspec.to_builtins(config),
            max_bytes=self.settings.journal_max_bytes,
            now=self._clock.now(),
        )

    def _agent(self, agent: AgentSettings) -> AgentClient:
        return AgentClient(
            self._session,
            agent.url,
            timeout_s=self.settings.timeouts.agent_s,
            credentials=agent,
            prefix=self.settings.slot_prefix(agent.id),
        )

    def reconfigure(self, given: GatewaySettings) -> tuple[list[str], tuple[str, ...]]:
        """Takes over what a running gateway can, and returns the agents that came and the fields
        that need a restart."""
        merged, waiting = self.settings.with_new(given)
        new = [agent for agent in merged.agents if agent not in self.settings.agents]
        self.settings = merged
        self.dispatcher.policy.reconfigure(merged.routing_config)
        self.answered.reconfigure(merged.answer_bounds)
        for agent in new:
            self.offers.add_agent(agent.id, self._agent(agent), agent.guests)
        self.wake.set()
        return [agent.id for agent in new], waiting

    async def start(self) -> None:
        """Resume the state of the previous process, then watch engines, stalls and agents."""
        self.switches.resume()
        self.versions.resume()
        for given in self.settings.dedicated:
            engine = Engine(
                engine=EngineId(given.id),
                kind=given.kind,
                url=given.url,
                concurrency=given.concurrency,
                numerics=given.numerics,
            )
            self.fleet.add(engine, self.engine_client(given.url, credentials=given))
        loops: list[Coroutine[Any, Any, None]] = [
            self.probing.run(period_s=self.settings.timeouts.health_s),
            self.runner.stalls.run(),
            self._watch_expired(),
        ]
        if self.settings.agents:
            loops.append(self.harvest.run(period_s=self.settings.capacity_period_s))
        self._policy_fault = asyncio.get_running_loop().create_future()
        self._tasks = [*map(asyncio.create_task, loops), self._policy_fault]

    async def _watch_expired(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRED_S)
            now = self._clock.now()
            self.answered.expire(now=now)
            self.switches.expire(now=now)
            self.pauses.expire(now=now)
            for turns in (each for each in self.turns.values() if each.unrecorded):
                turns.record_refusal()
            self._versions_log.check(now=now)
            self._capacity_log.check(now=now)

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
            # Runs in reverse order; a step runs even if an earlier one failed.
            for close in (self.state.close, self._capacity_log.close, self._versions_log.close):
                steps.callback(close)
            steps.push_async_callback(self.fleet.close)
            steps.callback(self._render.close)
            steps.push_async_callback(self.harvest.release_all)
            steps.push_async_callback(self._end_loops)
            for turns in self.turns.values():
                steps.push_async_callback(turns.close)
            steps.callback(self.runner.close)

    async def _end_loops(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def unrecorded(self) -> list[str]:
        """Nouns for the facts that journals and state file lack now."""
        lacking = {
            "budgets": self.harvest.budgets.fault,
            "decisions": self._versions_log.fault or self._capacity_log.fault,
            "leases": self.harvest.unrecorded,
            "refusals": any(turns.unrecorded for turns in self.turns.values()),
            "stops": self.stops.unrecorded,
            "switches": self.switches.unrecorded,
        }
        return [noun for noun, fault in lacking.items() if fault]

    def missing_decisions(self) -> int:
        """Decisions without a line in a journal."""
        return self._versions_log.missing_total + self._capacity_log.missing_total
