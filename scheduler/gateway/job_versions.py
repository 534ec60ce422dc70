"""Versions that jobs publish, and which job the engines serve: recorded before the fleet moves."""

import asyncio
import logging
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted, PeerProtocolError, Stale
from harvester.contracts.ids import EngineId, JobId, WeightVersion
from harvester.contracts.wire.rollouts import VersionSwitchState
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.job_turns import JobTurns
from scheduler.gateway.policy.store_owners import StoreOwners, StoreRule
from scheduler.gateway.policy.versions_events import JobActivated, JobVersion, VersionPublished
from scheduler.gateway.version_staging import SHOWN_S, VersionStaging
from scheduler.model import EngineKind

_log = logging.getLogger(__name__)


class JobVersions:
    def __init__(
        self,
        fleet: EngineFleet,
        staging: VersionStaging,
        turns: Mapping[JobId, JobTurns],
        state: SchedulerState,
        clock: Clock,
        *,
        publish_s: float,
        wake: asyncio.Event,
    ) -> None:
        """`publish_s`: longest wait for the dedicated engines. `wake`: set when a job is
        activated."""
        self._jobs = jobs = fleet.registry.jobs
        self._fleet = fleet
        self._staging = staging
        self._turns = turns
        self._state = state
        self._clock = clock
        self._announced_s: dict[JobId, float] = {}
        """Publish time of each job's newest version; versions restored at the start have none."""
        self._publish_s = publish_s
        self._wake = wake
        rules = {
            job: StoreRule(tenant=given.tenant, pattern=given.stores) for job, given in jobs.items()
        }
        self._owners = StoreOwners(rules, state.stores())
        self._refusals: dict[JobId, str] = {}
        """The last refusal of each job's announcements."""

    def newest(self, job: JobId) -> WeightVersion:
        """The job's newest published version; 0 before the first."""
        return self._fleet.policy.newest(job)

    def is_active(self, job: JobId) -> bool:
        target = self._fleet.policy.target
        return target is not None and target.job == job

    def resume(self) -> None:
        """Takes up versions and the active job of the previous process."""
        stored = self._state.jobs()
        active = next((job for job in self._jobs if job in stored and stored[job].active), None)
        configured = next((job for job, given in self._jobs.items() if given.active), None)
        only = next(iter(self._jobs)) if len(self._jobs) == 1 else None
        active = active or configured or only
        # The active job's version first: the first publish that the policy observes sets its
        # target.
        for job, facts in sorted(stored.items(), key=lambda item: item[0] != active):
            if job in self._jobs and facts.published.version:
                self._fleet.switching.observe(facts.published)
        for job, given in self._jobs.items():
            line = "job %s of tenant %s is registered, at version %d"
            _log.info(line, job, given.tenant, self.newest(job))
        if active is not None:
            self._fleet.switching.observe(JobActivated(job=active))

    async def publish(self, published: VersionPublished) -> dict[EngineId, VersionSwitchState]:
        """The engines, unless they serve another tenant's job. It goes on if the caller leaves,
        as one does that announces the next version: engines may have prepared it for minutes.

        Raises Stale if the job is past it, or comes to be meanwhile, Exhausted if dedicated engines
        took too long, or if it cannot be recorded: then nothing has moved. PeerProtocolError for a
        store that is not the job's.
        """
        publishing = self._fleet.spawn(self._publish(published))
        # The log has a refusal whose caller has left; no task may end with it untaken.
        publishing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(publishing)

    async def _publish(self, published: VersionPublished) -> dict[EngineId, VersionSwitchState]:
        job, store, version = published.job, published.store, published.version
        self._check_store(job, store)
        policy, target = self._fleet.policy, JobVersion(job=job, store=store, version=version)
        with self._logging_refusals(job, f"version {version} of store {store}"):
            if published.state_hash and (refusal := policy.refusal(published)):
                # A trainer that goes on after this would get the other run's samples.
                await self._turns[job].end_run(f"the job's last publish was refused: {refusal}")
                raise Stale(refusal)
            if self._takes_engines(job):
                due = partial(self._takes_engines, job)
                await self._staging.prepare(target, patience_s=SHOWN_S, is_due=due)
            self._check_store(job, store)  # Another tenant may have published it meanwhile.
            serves = self._takes_engines(job)
            new = target != policy.published(job)
            owns = self._owners.remembers(job, store)
            resumes = new or bool(published.state_hash)
            record = partial(
                self._state.publish, published, activate=serves, owns=owns, resumes=resumes
            )
            self._observe(published, record)
            self._owners.note(job, store)
            if resumes:
                self._turns[job].begin_run()
            if new:
                self._announced_s[job] = self._clock.now()
                line = "job %s: version %d of store %s is announced%s"
                _log.info(line, job, version, store, "" if serves else "; the job is not active")
            if serves:
                await self._until_served(target, patience_s=SHOWN_S)
        return policy.switch_states(job, version) if self._fleet.registry.shows_engines(job) else {}

    async def activate(
        self, job: JobId, *, check: Callable[[], None] = lambda: None
    ) -> tuple[WeightVersion, dict[EngineId, VersionSwitchState]]:
        """Serve this job from now on. Raises Stale while it has published nothing to load,
        Exhausted as `publish` does, and what `check` raises where the engines may not be taken."""
        policy = self._fleet.policy
        with self._logging_refusals(job, "activation"):
            check()
            prepared: JobVersion | None = None
            until_s = self._clock.now() + self._staging.stage_s
            # Another version may be published meanwhile and is then served instead.
            while (
                (published := policy.published(job))
                and published != prepared
                and self._clock.now() < until_s
            ):
                await self._staging.prepare(published, patience_s=self._patience_s(job))
                prepared = published
            check()  # Turns may have begun while engines prepared.
            self._observe(JobActivated(job=job), lambda: self._state.activate(job))
            self._wake.set()
            target = policy.target
            assert target is not None
            try:
                await self._until_served(target, patience_s=self._patience_s(job))
            except (Exhausted, Stale) as error:
                active = f"job {job} is active; " * self.is_active(job)
                raise Exhausted(f"{active}{error}") from error
        return target.version, policy.switch_states(job, target.version)

    def _check_store(self, job: JobId, store: str) -> None:
        if refusal := self._owners.refusal(job, store):
            raise PeerProtocolError(f"store: {refusal}")

    def _takes_engines(self, job: JobId) -> bool:
        """Whether its publish leads the engines."""
        return self.is_active(job) or self._fleet.policy.target is None

    def _observe(self, event: VersionPublished | JobActivated, record: Callable[[], None]) -> None:
        """Recorded before the fleet moves. Raises Stale, and Exhausted if it cannot be recorded."""
        if not (refusal := self._fleet.policy.refusal(event)):
            try:
                record()
            except sqlite3.Error as error:
                raise Exhausted(
                    f"nothing was changed: state_file cannot be written: {error}"
                ) from error
        self._fleet.switching.observe(event)
        if refusal:
            raise Stale(refusal)

    def _patience_s(self, job: JobId) -> float:
        """Time for which the job's newest version may yet come to be seen by engines."""
        return self._announced_s.get(job, -math.inf) + SHOWN_S - self._clock.now()

    async def _until_served(self, target: JobVersion, *, patience_s: float) -> None:
        if not await self._fleet.switching.settled(
            target, timeout_s=self._publish_s, patience_s=patience_s
        ):
            if (newest := self.newest(target.job)) > target.version:
                raise Stale(
                    f"version {target.version} was overtaken: job {target.job} is at version "
                    f"{newest}"
                )
            states = self._fleet.policy.switch_states(target.job, target.version)
            late = [
                f"engine {engine} is catching up"
                for engine, member in self._fleet.members.items()
                if member.engine.kind is EngineKind.DEDICATED
                and not member.fault
                and states.get(engine) is VersionSwitchState.CATCHING_UP
                and self._fleet.registry.shows_engines(target.job)
            ]
            raise Exhausted(
                f"version {target.version} of {target.job} is not served by every dedicated engine"
                + "; ".join(["", *self._fleet.registry.faults(target.job), *late])
            )

    @contextmanager
    def _logging_refusals(self, job: JobId, what: str) -> Iterator[None]:
        """Logs a refusal once, however often it is repeated."""
        try:
            yield
        except (Stale, Exhausted) as error:
            if self._refusals.get(job) != (refusal := f"{what}: {error}"):
                _log.warning("job %s: %s", job, refusal)
            self._refusals[job] = refusal
            raise
        self._refusals.pop(job, None)
