"""The scheduler of one gateway, put together: policies, their shells, durable state, metrics."""

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError, Exhausted, Stale
from harvester.contracts.ids import EngineId, JobId, SlotId, TenantId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import GenerateRequest, SwitchState
from scheduler.policy.capacity import CapacityConfig, CapacityPolicy, Demand
from scheduler.policy.model import Engine, EngineKind
from scheduler.policy.routing import (
    RoutingPolicy,
)
from scheduler.policy.routing_events import (
    RefuseTurn,
    RoutingConfig,
)
from scheduler.policy.trajectories import Turn, TurnLedger
from scheduler.policy.versions import (
    VersionPolicy,
)
from scheduler.policy.versions_events import (
    JobActivated,
    VersionPublished,
    VersionsConfig,
)
from scheduler.service.config import AgentSettings, GatewaySettings, JobSettings
from scheduler.service.decisions import DecisionLog
from scheduler.service.dispatch import Dispatcher
from scheduler.service.engine import EngineClient
from scheduler.service.fleet import Fleet, Member, dedicated_places, watch_health
from scheduler.service.harvest import Harvest
from scheduler.service.leases import AgentClient
from scheduler.service.metrics import GatewayMetrics
from scheduler.service.open_turns import Listen, OpenTurns
from scheduler.service.state import SchedulerState
from scheduler.service.switch_deadlines import Switch, SwitchDeadlines
from scheduler.service.turns import TurnRunner

_log = logging.getLogger(__name__)

_SWITCHES_S = 0.25
"""Between two looks at switches that were on for a time."""
# Session ids seen, to count trajectories once; forgotten together when there are too many.
_SESSIONS_REMEMBERED = 1 << 17


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
        self._tasks: list[asyncio.Task[None]] = []
        self.jobs: dict[JobId, JobSettings] = {JobId(job.id): job for job in settings.jobs}
        self.ledgers = {job: TurnLedger(job) for job in self.jobs}
        self._harvesting = {job: given.harvesting for job, given in self.jobs.items()}
        self.tokens = {job: dict.fromkeys(EngineKind, 0) for job in self.jobs}
        """Generated so far, by the kind of engine."""
        self._deadlines = SwitchDeadlines()
        self.exported: dict[tuple[JobId, str], int] = {}
        """Ledger totals that the metrics have had."""
        self._sessions: set[tuple[JobId, TrajectoryId]] = set()
        times = settings.timeouts
        moved = {"moved_after_s": settings.timeouts.guest_stall_s}
        routing = RoutingPolicy(msgspec.convert(moved | settings.routing, RoutingConfig))
        self.dispatcher = Dispatcher(routing, clock, queue_s=times.queue_s)
        versions_config = {
            "min_dedicated": int(any(e.kind is EngineKind.DEDICATED for e in settings.engines)),
            **settings.versions,
        }
        versions = VersionPolicy.from_config(versions_config)
        self._versions_log = self._log(versions, msgspec.convert(versions_config, VersionsConfig))
        self.fleet = Fleet(
            versions,
            self.dispatcher,
            self._versions_log,
            clock,
            update_s=times.update_s,
            adapter_of=lambda job: self.jobs[job].adapter,
        )
        self.dispatcher.waits_for_permit = lambda job: not self.fleet.may_use_dedicated(job)
        self.fleet.on_served = lambda member, seconds: self.metrics.switch_s.labels(
            member.engine.kind
        ).observe(seconds)
        self.runner = TurnRunner(
            self.fleet,
            self.dispatcher,
            self,
            clock,
            timeouts=times,
            max_attempts=settings.max_attempts,
        )
        self._open_turns = {
            job: OpenTurns(
                ledger,
                lambda turn, on_tokens: self.runner.run(turn, on_tokens=on_tokens),
                on_end=self._count_end,
                rejoin_s=times.rejoin_s,
            )
            for job, ledger in self.ledgers.items()
        }
        self.harvest = self._make_harvest()
        self.fleet.leasable_contexts = self.harvest.leasable_contexts
        self.dispatcher.on_queued = self.harvest.wake

    def _make_harvest(self) -> Harvest:
        settings = self.settings
        config = {"instance": f"gateway-{secrets.token_hex(12)}", **settings.capacity}
        policy = CapacityPolicy.from_config(config)
        self._capacity_log = self._log(policy, msgspec.convert(config, CapacityConfig))
        return Harvest(
            policy,
            self.fleet,
            self.state,
            self._capacity_log,
            self._clock,
            agents={agent.id: self._agent(agent) for agent in settings.agents},
            guests={SlotId(e.slot): e for e in settings.engines if e.slot is not None},
            session=self._session,
            connect_s=settings.timeouts.connect_s,
            demands=self.demands,
            tenant_of=lambda job: TenantId(self.jobs[job].tenant),
        )

    def _log(self, policy: Any, config: msgspec.Struct) -> DecisionLog:
        return DecisionLog(
            self.settings.journal_dir,
            policy,
            msgspec.to_builtins(config),
            max_bytes=self.settings.journal_max_bytes,
        )

    def _agent(self, agent: AgentSettings) -> AgentClient:
        token = "" if agent.token_file is None else _read_token(agent.token_file)
        timeout_s = self.settings.timeouts.agent_s
        return AgentClient(self._session, agent.url, token=token, timeout_s=timeout_s)

    async def start(self) -> None:
        """Take up what was going on before, then watch engines, stalls and agents."""
        self._resume()
        times = self.settings.timeouts
        for given in self.settings.engines:
            if given.kind is EngineKind.DEDICATED:
                client = EngineClient(self._session, given.url, connect_s=times.connect_s)
                self.fleet.add(
                    Engine(
                        engine=EngineId(given.id),
                        kind=given.kind,
                        url=given.url,
                        concurrency=given.concurrency,
                        numerics=given.numerics,
                    ),
                    client,
                )
        loops: list[Coroutine[Any, Any, None]] = [
            watch_health(self.fleet, period_s=times.health_s),
            self.runner.watch_stalls(),
            self._watch_switches(),
        ]
        if self.settings.agents:
            loops.append(self.harvest.run(period_s=self.settings.capacity_period_s))
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    def _resume(self) -> None:
        for job in self.state.parked():
            self.fleet.use_dedicated(job, enabled=False)
        active: JobId | None = None
        for job, facts in self.state.jobs().items():
            if job not in self.jobs:
                continue
            if facts.harvesting is not None:
                self._harvesting[job] = facts.harvesting
            if facts.active:
                active = job
        configured = next((job for job, given in self.jobs.items() if given.active), None)
        active = active or configured or (next(iter(self.jobs)) if len(self.jobs) == 1 else None)
        # The active job's version first: the first publish that the policy hears sets its target.
        stored = sorted(self.state.jobs().items(), key=lambda item: item[0] != active)
        for job, facts in stored:
            if job in self.jobs and facts.version:
                self.fleet.observe(
                    VersionPublished(job=job, store=facts.store, version=facts.version)
                )
        if active is not None:
            self.fleet.observe(JobActivated(job=active))

    async def failed(self) -> None:
        """Returns never; raises what stopped one of the loops, which must all go on."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self) -> None:
        """Open turns end with what they have; leases are given back."""
        self.runner.close()
        for open_turns in self._open_turns.values():
            await open_turns.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.harvest.release_all()
        await self.fleet.close()
        self._versions_log.close()
        self._capacity_log.close()
        self.state.close()

    async def generate(
        self,
        job: JobId,
        trajectory: TrajectoryId,
        request: GenerateRequest,
        *,
        on_turn: Listen | None = None,
    ) -> tuple[Turn, RefuseTurn | None]:
        """Serve one turn to its end, or join it where the job asked for the same before.

        A cancelled call leaves the turn for `rejoin_s`, then it is aborted on its engine.
        """
        return await self._open_turns[job].serve(
            request,
            trajectory=trajectory,
            on_turn=on_turn,
            on_begin=lambda: self._count_session(job, trajectory),
        )

    def model_names(self, job: JobId) -> set[str]:
        """What a request of the job may name as its model."""
        told = {member.model for member in self.fleet.members.values()}
        return {job, self.jobs[job].adapter or job, *filter(None, told)}

    async def publish(
        self, job: JobId, *, store: str, version: WeightVersion, cut_exact: bool
    ) -> dict[EngineId, SwitchState]:
        """Raises Stale if the job is past it, Exhausted if dedicated engines took too long."""
        published = VersionPublished(job=job, store=store, version=version, cut_exact=cut_exact)
        await self.fleet.stage(job, store=store, version=version)
        self._observe(published)
        self.state.publish(job, store=store, version=version)
        target = self.fleet.policy.target
        if target is not None and target.job == job:
            self.state.activate(job)
            await self._settle(job, version)
        return self.fleet.policy.switch_states(job, version)

    async def activate(self, job: JobId) -> tuple[WeightVersion, dict[EngineId, SwitchState]]:
        """Serve this job from now on. Raises Stale while it has published nothing to load."""
        self._observe(JobActivated(job=job))
        self.state.activate(job)
        self.harvest.wake()
        target = self.fleet.policy.target
        assert target is not None
        await self._settle(job, target.version)
        return target.version, self.fleet.policy.switch_states(job, target.version)

    def set_harvesting(self, job: JobId, *, enabled: bool, for_s: float | None = None) -> None:
        """`for_s`: off again then, and after a restart, unless it was switched on again."""
        self._switched(job, Switch.HARVESTING, for_s)
        self._harvesting[job] = enabled
        self.state.set_harvesting(job, enabled=enabled and for_s is None)
        self.harvest.wake()

    def harvesting(self, job: JobId) -> bool:
        return self._harvesting[job]

    def use_dedicated(self, job: JobId, *, enabled: bool, for_s: float | None = None) -> None:
        """`for_s` as of harvesting."""
        self._switched(job, Switch.DEDICATED, for_s)
        self.state.use_dedicated(job, enabled=enabled and for_s is None)
        self.fleet.use_dedicated(job, enabled=enabled)
        self.harvest.wake()

    def demands(self) -> tuple[Demand, ...]:
        target, routing = self.fleet.policy.target, self.dispatcher.policy
        active = target.job if target else None
        places = dedicated_places(self.fleet)
        return tuple(
            Demand(
                job=job,
                active=job == active,
                harvesting=self._harvesting[job],
                queued=routing.queued_turns_of(job),
                running=routing.open_turns_of(job),
                dedicated_places=places if self.fleet.may_use_dedicated(job) else 0,
                dispatched=dict(self.dispatcher.dispatched) if job == active else {},
                s_per_token=routing.speeds() if job == active else {},
            )
            for job in self.jobs
        )

    def generated(self, turn: Turn, member: Member, tokens: int) -> None:
        if tokens:
            engine = member.engine
            self.metrics.generated_tokens.labels(turn.job, engine.engine, engine.kind).inc(tokens)
            self.tokens[turn.job][engine.kind] += tokens

    def lease_refused(self, member: Member) -> None:
        self.harvest.refused(member)

    def _switched(self, job: JobId, switch: Switch, for_s: float | None) -> None:
        until_s = None if for_s is None else self._clock.now() + for_s
        self._deadlines.switched(job, switch, until_s=until_s)

    async def _watch_switches(self) -> None:
        while True:
            await asyncio.sleep(_SWITCHES_S)
            for job, switch in self._deadlines.passed(now=self._clock.now()):
                _log.warning("job %s: %s goes off, nobody has renewed it", job, switch)
                turn_off = self.use_dedicated
                if switch is Switch.HARVESTING:
                    turn_off = self.set_harvesting
                turn_off(job, enabled=False)

    def _observe(self, event: VersionPublished | JobActivated) -> None:
        self.fleet.last_refusal = ""
        self.fleet.observe(event)
        if self.fleet.last_refusal:
            raise Stale(self.fleet.last_refusal)

    async def _settle(self, job: JobId, version: WeightVersion) -> None:
        timeout_s = self.settings.timeouts.publish_s
        if not await self.fleet.settled(job, version, timeout_s=timeout_s):
            faults = [
                f"{member.engine.engine}: {member.fault}"
                for member in self.fleet.members.values()
                if member.fault
            ]
            raise Exhausted(
                f"version {version} of {job} is not served by every dedicated engine "
                f"after at most {timeout_s:.0f} s" + "; ".join(["", *faults])
            )

    def _count_session(self, job: JobId, trajectory: TrajectoryId) -> None:
        if (job, trajectory) not in self._sessions:
            if len(self._sessions) >= _SESSIONS_REMEMBERED:
                self._sessions.clear()
            self._sessions.add((job, trajectory))
            self.metrics.trajectories.labels(job, "started").inc()

    def _count_end(self, turn: Turn) -> None:
        self.metrics.turns.labels(turn.job, turn.outcome).inc()
        pin = turn.request.weight_version
        stale = sum(
            span.end - span.start
            for span in turn.choice().spans
            if (pin.exact is not None and span.version != pin.exact)
            or (pin.minimum is not None and span.version < pin.minimum)
        )
        if stale:
            self.metrics.stale_tokens.labels(turn.job).inc(stale)


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read agent token {path}: {error.strerror}") from error
