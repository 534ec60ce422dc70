"""The engines: which are up, the version that each serves, the turns on each.

The shell around the version policy: it carries out quiesce, update and serve, and informs routing.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from harvester.contracts.clock import Clock
from harvester.contracts.ids import EngineId, JobId, WeightVersion
from harvester.contracts.wire.engines import FIRST_CORE_FEATURE
from scheduler.decision_log import DecisionLog
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engine_registry import EngineRegistry
from scheduler.gateway.engines.engine_client import EngineClient
from scheduler.gateway.engines.engine_faults import EngineLost, EngineUnreachable
from scheduler.gateway.engines.identity import HeldWeights
from scheduler.gateway.fleet_member import FleetMember, numerics_of
from scheduler.gateway.gateway_metrics import GatewayMetrics
from scheduler.gateway.policy.engine_health import EngineLog
from scheduler.gateway.policy.routing_events import ContextLimited, EngineOffered, EngineWithdrawn
from scheduler.gateway.policy.versions_events import (
    EngineEmptied,
    EngineJoined,
    EngineLeft,
    EngineUpdated,
    QuiesceEngine,
    RefusePublish,
    Retarget,
    ServeEngine,
    SettlePublish,
    UpdateEngine,
    VersionsEffect,
)
from scheduler.gateway.request_blame import RequestBlame
from scheduler.gateway.running_attempt import CutReason, RunningAttempt
from scheduler.gateway.version_switching import VersionSwitching
from scheduler.model import Engine, EngineKind, Lease

T = TypeVar("T")
_log = logging.getLogger(__name__)
_FIRST_CORE = "engine %s: its weights are checked on its first data-parallel rank alone"


class EngineFleet:
    def __init__(
        self,
        registry: EngineRegistry,
        dispatcher: Dispatcher,
        blame: RequestBlame,
        log: DecisionLog,
        metrics: GatewayMetrics,
        clock: Clock,
        update_s: float,
        *,
        on_fault: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        """`on_fault`: called with an error of the version policy."""
        self.registry = registry
        self.members = registry.members
        self.policy = registry.versions
        self.switching = VersionSwitching(self.policy, log, clock, self._apply, on_fault)
        self._dispatcher = dispatcher
        self._blame = blame
        self._metrics = metrics
        self._clock = clock
        self._update_s = update_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._active_job: JobId | None = None
        self._served: tuple[JobId, WeightVersion] | None = None
        """Job and version of the last log line."""
        self._context_limit: int | None = None

    def add(
        self,
        engine: Engine,
        client: EngineClient,
        *,
        lease: Lease | None = None,
        idle_ratio: float | None = None,
    ) -> FleetMember:
        """Adds an engine. It is up after its first good health check, a leased one at once."""
        member = FleetMember(
            engine=engine,
            client=client,
            lease=lease,
            idle_ratio=idle_ratio,
            numerics=engine.numerics,
            # The line about its lease says that a guest joins.
            log=EngineLog(up=lease is not None),
        )
        self.members[engine.engine] = member
        self.review_contexts()
        if lease is not None:
            self.up(member)
        return member

    def up(self, member: FleetMember) -> None:
        if not member.up:
            member.up, member.fault = True, ""
            joined = EngineJoined(engine=member.engine.engine, kind=member.engine.kind)
            self.switching.observe(joined)
            self.log_state(member)

    def log_state(self, member: FleetMember) -> None:
        """Logs the engine's state if it differs from the last logged one."""
        before = member.log.losses
        if line := member.log.line(up=member.up, losses=member.losses, now=self._clock.now()):
            level = logging.INFO if member.log.losses == before else logging.WARNING
            _log.log(level, "engine %s %s", member.engine.engine, line)

    def log_fault(self, member: FleetMember, fault: str) -> None:
        """Logs a fault that the engine did not have before."""
        if fault not in ("", member.fault) and member.log.limit.admits(now=self._clock.now()):
            _log.warning("engine %s is not served: %s", member.engine.engine, fault)
            member.log.unserved = True

    def down(self, member: FleetMember, fault: str, *, cut: CutReason = CutReason.ENGINE) -> None:
        """Lost: its turns go on elsewhere, and when it is back its weights are unknown."""
        if not member.up:
            return
        if cut is CutReason.DOUBT:
            member.doubted = member.lost()
        if cut in (CutReason.ENGINE, CutReason.DOUBT):
            self._blame.died(
                member.engine.engine,
                member.lost(),
                fault,
                proven=member.doubted is None,
                now=self._clock.now(),
            )
        member.up, member.fault, member.quiesced_at_s = False, fault, None
        member.losses, member.log.fault = member.losses + 1, fault
        if cut is not CutReason.LEASE:  # A lease's end is logged already.
            self.log_state(member)
        member.is_described, member.seen_context_tokens, member.held_tokens = False, 0, 0
        member.streak.succeed()
        self._dispatcher.observe(EngineWithdrawn(engine=member.engine.engine))
        if member.updating is not None:
            member.updating.cancel()
            member.updating = None
        if member.doubted is None:
            member.client.forget()
        self.switching.observe(EngineLeft(engine=member.engine.engine))
        for running in tuple(member.running):
            running.cut(cut)

    def review_contexts(self) -> None:
        """Turns that no engine fits are refused, once it is known of every engine."""
        limit = self.registry.context_limit()
        if limit != self._context_limit:
            self._context_limit = limit
            self._dispatcher.observe(ContextLimited(tokens=limit))

    def context_ended(self, member: FleetMember, tokens: int) -> None:
        """The engine cut a turn off at `tokens` tokens, below the turn's own limit, or refuses any
        that is longer."""
        member.seen_context_tokens = tokens
        self._offer(member)
        self.review_contexts()

    def use_dedicated(self, job: JobId, *, enabled: bool) -> None:
        """Sets whether the job's turns may run on dedicated engines.

        When disabled, its turns go on elsewhere with their tokens; the engines stay up to date.
        """
        if enabled == self.registry.may_use_dedicated(job):
            return
        (self.registry.parked.discard if enabled else self.registry.parked.add)(job)
        target = self.policy.target
        if target is None or target.job != job:
            return
        for member in tuple(self.members.values()):
            if member.engine.kind is not EngineKind.DEDICATED or not member.up:
                continue
            if enabled:
                self._offer(member)
            else:
                self._dispatcher.observe(EngineWithdrawn(engine=member.engine.engine))
                for running in tuple(member.running):
                    if running.turn.job == job:
                        running.cut(CutReason.PERMIT)

    def remove(self, engine: EngineId, reason: str) -> None:
        member = self.members.get(engine)
        if member is not None:
            self.down(member, reason, cut=CutReason.LEASE)
            del self.members[engine]
            member.client.close()
            self.review_contexts()

    def renewed(self, engine: EngineId, lease: Lease, *, idle_ratio: float | None = None) -> bool:
        """Whether the engine is known."""
        member = self.members.get(engine)
        if member is None:
            return False
        member.lease, member.idle_ratio = lease, idle_ratio
        self._offer(member)
        return True

    def hold(self, engine: EngineId, *, held: bool) -> bool:
        """Sets whether the engine gets no new turns; its turns go on. Returns whether it has no
        turns."""
        member = self.members.get(engine)
        if member is None:
            return True
        if member.held != held:
            member.held = held
            if held:
                self._dispatcher.observe(EngineWithdrawn(engine=engine))
            else:
                self._offer(member)
        return not member.running

    def began(
        self, engine: EngineId, running: RunningAttempt, version: WeightVersion
    ) -> FleetMember | None:
        """Registers the attempt and returns its engine; None if the engine has left the fleet or
        the version since the turn was placed."""
        member = self.members.get(engine)
        serves = self.policy.serves(engine, running.turn.job, version)
        if member is None or not (member.up and serves):
            return None
        member.running.add(running)
        return member

    def ended(self, member: FleetMember, running: RunningAttempt) -> None:
        member.running.discard(running)
        if member.quiesced_at_s is not None and member.up and not member.running:
            self.switching.observe(EngineEmptied(engine=member.engine.engine))

    async def close(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self.members.values():
            member.client.close()
        # The engines' connections close in the event loop's next pass.
        await asyncio.sleep(0)

    def _apply(self, effect: VersionsEffect) -> None:
        match effect:
            case Retarget():
                self._dispatcher.observe(effect)
                self.switching.wake_publishers()
                if effect.job != self._active_job:
                    _log.info("job %s is active, at version %d", effect.job, effect.version)
                self._active_job = effect.job
            case QuiesceEngine():
                self._quiesce(self.members[effect.engine], effect)
            case UpdateEngine():
                member = self.members[effect.engine]
                member.updating = self.spawn(self._update(member, effect))
            case ServeEngine():
                self._serve(self.members[effect.engine])
            case SettlePublish():
                self.switching.wake_publishers()
                if self._served != (served := (effect.job, effect.version)):
                    _log.info("job %s: version %d is served by all dedicated engines up", *served)
                self._served = served
            case RefusePublish():
                pass  # Its caller asked before.

    def _quiesce(self, member: FleetMember, effect: QuiesceEngine) -> None:
        if member.quiesced_at_s is None:
            member.quiesced_at_s = self._clock.now()
        self._dispatcher.observe(EngineWithdrawn(engine=effect.engine))
        target = self.policy.target
        assert target is not None
        for running in tuple(member.running):
            pin = running.turn.pin
            goes_on = running.turn.job == target.job and pin.exact is None
            if goes_on and pin.admits(target.version):
                running.cut(CutReason.SWITCH)
            elif effect.cut_exact:
                running.cut(CutReason.END)
        if not member.running:
            self.switching.observe(EngineEmptied(engine=effect.engine))

    async def _update(self, member: FleetMember, effect: UpdateEngine) -> None:
        fault, died = "", False
        try:
            if not member.is_described:
                guest_of = member.lease.slot if member.lease is not None else None
                member.description = await member.client.describe(guest_of)
                if fault := self.registry.twin_of(member):
                    raise EngineLost(fault)
                member.is_described = True
                if FIRST_CORE_FEATURE in member.description.features:
                    _log.warning(_FIRST_CORE, effect.engine)
            if fault := self.registry.review_clash(member):
                raise EngineLost(fault)
            member.description = await member.client.switch(
                HeldWeights(effect.store, effect.version, effect.state_hash),
                timeout_s=self._update_s,
                adapter=self.registry.jobs[effect.job].adapter,
            )
            member.numerics = member.engine.numerics or await self._numerics(member)
            fault = self.registry.review_clash(member) or self._other_run(member, effect)
        except EngineLost as error:
            fault, died = str(error), isinstance(error, EngineUnreachable)
        except Exception as error:
            # An unforeseen error: without this, the engine would stay in its update for ever.
            _log.exception("engine %s: update to %s", effect.engine, effect.version)
            fault = f"{type(error).__name__}: {error}"
        # While all engines switch, none serves that could disagree.
        member.clashes = member.clashes and bool(fault)
        self.review_contexts()
        if member.updating is asyncio.current_task():
            self.log_fault(member, fault)
            member.updating, member.fault = None, fault
            if died:
                # A dead engine did not fail to load the version, and its identity is not judged.
                self.down(member, fault)
            else:
                self.switching.observe(
                    EngineUpdated(
                        engine=effect.engine,
                        job=effect.job,
                        version=effect.version,
                        fault=fault,
                        state_hash=member.client.state_hash,
                    )
                )
            if fault:
                self.switching.wake_publishers()
            else:
                self._end_clashes()

    def _other_run(self, member: FleetMember, loaded: UpdateEngine) -> str:
        """Why the loaded weights belong to another run, although the number matches; "" if none."""
        known, held = self.policy.state_hash(loaded.job, loaded.version), member.client.state_hash
        if not known or held == known or not (held or loaded.state_hash):
            return ""
        return f"it holds version {loaded.version} of another run: {held}, the job's is {known}"

    def _end_clashes(self) -> None:
        """A dedicated engine that joins stays; guests that clash with it go."""
        if self.registry.agree():
            return
        for other in tuple(self.members.values()):
            if (
                other.up
                and self.registry.is_serving(other.engine.engine)
                and (fault := self.registry.review_clash(other))
            ):
                self.down(other, fault, cut=CutReason.CLASH)
                self.review_contexts()

    async def _numerics(self, member: FleetMember) -> str:
        member.vllm_version = await member.client.vllm_version()
        return numerics_of(member.engine.engine, member.vllm_version, member.description)

    def _serve(self, member: FleetMember) -> None:
        began_s, member.quiesced_at_s = member.quiesced_at_s, None
        if began_s is not None:
            member.switch_s = self._clock.now() - began_s
            self._metrics.switch_s.labels(member.engine.kind).observe(member.switch_s)
        if member.log.unserved:
            member.log.unserved = False
            _log.info("engine %s is served now", member.engine.engine)
        self._offer(member)

    def _offer(self, member: FleetMember) -> None:
        """Tells routing of an engine that serves the target and that its job may use."""
        lease, engine, target = member.lease, member.engine, self.policy.target
        if target is None or member.held or not self.registry.is_serving(engine.engine):
            return
        if engine.kind is EngineKind.DEDICATED and not self.registry.may_use_dedicated(target.job):
            return
        self._dispatcher.observe(
            EngineOffered(
                engine=engine.engine,
                kind=engine.kind,
                concurrency=engine.concurrency,
                job=target.job,
                version=target.version,
                usable_until_s=lease.expires_s if lease else None,
                context_tokens=member.context_tokens,
                numerics=member.numerics,
                idle_ratio=member.idle_ratio,
            )
        )

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
