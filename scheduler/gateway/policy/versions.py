"""Orders version switches: the version of each engine, and the end of a publish.

The fleet has one target, a job and its version. An engine that is not at the target stops taking
turns (quiescing), is updated once no turn is open on it, and serves again. Open turns whose pin
admits the target are cut with what they have and go on at the new version; a turn pinned to exactly
the old version is waited for, unless the publisher cuts it. A publish is settled when every
dedicated engine serves it; harvested engines catch up and take no turn meanwhile.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from harvester.contracts.ids import EngineId, JobId, WeightVersion
from harvester.contracts.wire.rollouts import VersionSwitchState
from scheduler.gateway.policy.versions_events import (
    EngineEmptied,
    EngineJoined,
    EngineLeft,
    EngineUpdated,
    JobActivated,
    JobVersion,
    QuiesceEngine,
    RefusePublish,
    Retarget,
    ServeEngine,
    SettlePublish,
    TimePassed,
    UpdateEngine,
    VersionPublished,
    VersionsConfig,
    VersionsEffect,
    VersionsEvent,
)
from scheduler.model import BASE_VERSION, NO_JOB, EngineKind


class EngineState(StrEnum):
    QUIESCING = "quiescing"
    """Takes no turn; some are still open."""
    UPDATING = "updating"
    SERVING = "serving"
    FAILED = "failed"
    """The last update failed; tried again later."""


class VersionSwitchTrigger(StrEnum):
    RETARGET = "retarget"
    EMPTIED = "emptied"
    UPDATED = "updated"
    BROKE = "broke"
    RETRY = "retry"


# The whole life of an engine between joining and leaving. A pair that is not here changes nothing.
TRANSITIONS: dict[tuple[EngineState, VersionSwitchTrigger], EngineState] = {
    (EngineState.SERVING, VersionSwitchTrigger.RETARGET): EngineState.QUIESCING,
    (EngineState.QUIESCING, VersionSwitchTrigger.EMPTIED): EngineState.UPDATING,
    (EngineState.UPDATING, VersionSwitchTrigger.UPDATED): EngineState.SERVING,
    (EngineState.UPDATING, VersionSwitchTrigger.BROKE): EngineState.FAILED,
    (EngineState.FAILED, VersionSwitchTrigger.RETARGET): EngineState.UPDATING,
    (EngineState.FAILED, VersionSwitchTrigger.RETRY): EngineState.UPDATING,
}


@dataclass(slots=True)
class _Engine:
    kind: EngineKind
    state: EngineState
    job: JobId = NO_JOB
    version: WeightVersion = BASE_VERSION
    failed_at_s: float = 0.0
    loads: str = ""
    """The store of its last update."""
    failed: JobVersion | None = None
    """The version of its last failed update."""
    state_hash: str = ""
    """Hash of its weights, as it reports them."""

    def serves(self, job: JobId, version: WeightVersion) -> bool:
        return self.state is EngineState.SERVING and (self.job, self.version) == (job, version)

    def move(self, trigger: VersionSwitchTrigger) -> bool:
        to = TRANSITIONS.get((self.state, trigger))
        if to is not None:
            self.state = to
        return to is not None


class VersionPolicy:
    NAME: ClassVar[str] = "scheduler.policy.versions"
    SAMPLE: ClassVar[Any] = VersionsEvent

    def __init__(self, config: VersionsConfig) -> None:
        self._config = config
        self._engines: dict[EngineId, _Engine] = {}
        self._published: dict[JobId, JobVersion] = {}
        self._hashes: dict[JobId, str] = {}
        """Hash of each job's published version; empty if its publisher gave none."""
        self._served: dict[JobId, WeightVersion] = {}
        """The newest version of each job that an engine has served."""
        self._target: JobVersion | None = None
        self._settled = True

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "VersionPolicy":
        return cls(msgspec.convert(config, VersionsConfig))

    def snapshot(self) -> dict[str, Any]:
        """Versions and target, and the engines where a journal file goes on in another."""
        return {
            "published": [msgspec.to_builtins(job) for job in self._published.values()],
            "hashes": dict(self._hashes),
            "served": dict(self._served),
            "target": self._target.job if self._target else None,
            "settled": self._settled,
            "engines": msgspec.to_builtins(self._engines),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        jobs = msgspec.convert(snapshot["published"], list[JobVersion])
        self._published = {job.job: job for job in jobs}
        self._hashes = dict(snapshot.get("hashes", {}))
        self._served = dict(snapshot.get("served", {}))
        target = snapshot["target"]
        self._target = None if target is None else self._published[JobId(target)]
        self._settled = snapshot["settled"]
        self._engines = msgspec.convert(snapshot["engines"], dict[EngineId, _Engine])

    @property
    def target(self) -> JobVersion | None:
        return self._target

    @property
    def settled(self) -> bool:
        """Every dedicated engine serves the target."""
        return self._settled

    @property
    def failing(self) -> bool:
        """Whether the target is not settled for failed updates to it alone."""
        dedicated = (at for at in self._engines.values() if at.kind is EngineKind.DEDICATED)
        behind = [at for at in dedicated if at.state is not EngineState.SERVING]
        failed = (at.state is EngineState.FAILED and at.failed == self._target for at in behind)
        return bool(behind) and all(failed)

    def fails(self, engine: EngineId) -> bool:
        """Whether the engine's last update to the target failed; it may be trying again."""
        at = self._engines.get(engine)
        if at is None or at.failed is None or at.state is EngineState.SERVING:
            return False
        return at.failed == self._target

    def newest(self, job: JobId) -> WeightVersion:
        """The job's newest published version; 0 before the first."""
        published = self.published(job)
        return published.version if published else BASE_VERSION

    def published(self, job: JobId) -> JobVersion | None:
        return self._published.get(job)

    def state(self, engine: EngineId) -> EngineState | None:
        at = self._engines.get(engine)
        return at.state if at else None

    def version(self, engine: EngineId) -> WeightVersion | None:
        """The version that the engine was last brought to; None before the first since it joined:
        its weights are unknown."""
        at = self._engines.get(engine)
        return at.version if at and at.job != NO_JOB else None

    def serves(self, engine: EngineId, job: JobId, version: WeightVersion) -> bool:
        at = self._engines.get(engine)
        return at is not None and at.serves(job, version)

    def switch_states(
        self, job: JobId, version: WeightVersion
    ) -> dict[EngineId, VersionSwitchState]:
        states = VersionSwitchState
        return {
            engine: states.SWITCHED if at.serves(job, version) else states.CATCHING_UP
            for engine, at in sorted(self._engines.items())
        }

    def state_hash(self, job: JobId, version: WeightVersion) -> str:
        """Hash of a job's version as it was published, else as an engine that serves it reports it;
        "" if unknown. Two runs of a trainer give one number to two states."""
        published = self._published.get(job)
        if published and published.version == version and self._hashes.get(job):
            return self._hashes[job]
        serving = (at.state_hash for at in self._engines.values() if at.serves(job, version))
        return next(filter(None, serving), "")

    def refusal(self, event: JobVersion | JobActivated) -> str:
        """Why the event would be refused now; "" if it would not."""
        before = self._published.get(event.job)
        if isinstance(event, JobActivated):
            if (before and before.version) or not any(at.version for at in self._engines.values()):
                return ""
            return f"job {event.job} has published nothing; publish a version before activating it"
        # A version of a job is of one store for good, once an engine has served it: its number
        # alone says what an engine holds. Another store may have been announced by mistake.
        served = self._served.get(event.job, BASE_VERSION)
        if before is None or event.version > before.version:
            return ""
        if event.version > served and event.store != before.store:
            return ""
        if (event.store, event.version) == (before.store, before.version):
            known = self.state_hash(event.job, event.version)
            given = event.state_hash if isinstance(event, VersionPublished) else ""
            if given == known or not (given and known):
                return ""
            return (
                f"version {event.version} of store {event.store} is another one than engines hold: "
                "the store holds another run; start this run as another job with its own store"
            )
        return (
            f"job {event.job} is at version {before.version} of store {before.store}; "
            "versions only rise, whatever store they are in; begin a new run as another job, or go "
            f"on with Publisher(versions=Publisher.Versions(first_version={before.version + 1}))"
        )

    def observe(self, event: VersionsEvent, *, now: float) -> tuple[VersionsEffect, ...]:
        match event:
            case EngineJoined():
                effects = self._join(event)
            case EngineLeft():
                self._engines.pop(event.engine, None)
                effects = []
            case VersionPublished():
                effects = self._publish(event)
            case JobActivated():
                effects = self._activate(event.job)
            case EngineEmptied():
                effects = self._advance(event.engine, VersionSwitchTrigger.EMPTIED)
            case EngineUpdated():
                effects = self._updated(event, now)
            case TimePassed():
                effects = self._retry(now)
        return (*effects, *self._settle())

    def _join(self, event: EngineJoined) -> list[VersionsEffect]:
        at = self._engines[event.engine] = _Engine(event.kind, EngineState.UPDATING)
        target = self._target
        if target is None:
            at.state = EngineState.QUIESCING
            return []
        return [self._update(event.engine, target)]

    def _publish(self, event: VersionPublished) -> list[VersionsEffect]:
        if reason := self.refusal(event):
            return [RefusePublish(job=event.job, version=event.version, reason=reason)]
        now_at = JobVersion(job=event.job, store=event.store, version=event.version)
        if event.state_hash or now_at != self._published.get(event.job):
            self._hashes[event.job] = event.state_hash
        self._published[event.job] = now_at
        if event.resumed:
            self._served[event.job] = event.version
        if self._target is None or self._target.job == event.job:
            return self._retarget(now_at, cut_exact=event.cut_exact)
        return []

    def _activate(self, job: JobId) -> list[VersionsEffect]:
        to = self._published.get(job)
        if to is None:
            to = JobVersion(job=job, store="", version=WeightVersion(0))
        if reason := self.refusal(JobActivated(job=job)):
            return [RefusePublish(job=job, version=to.version, reason=reason)]
        self._published[job] = to
        return self._retarget(to, cut_exact=False)

    def _retarget(self, to: JobVersion, *, cut_exact: bool) -> list[VersionsEffect]:
        if to == self._target and not cut_exact:
            self._settled = False
            return []
        self._target, self._settled = to, False
        effects: list[VersionsEffect] = [Retarget(job=to.job, version=to.version)]
        for engine, at in sorted(self._engines.items()):
            if not at.serves(to.job, to.version):
                effects += self._advance(engine, VersionSwitchTrigger.RETARGET, cut_exact=cut_exact)
        return effects

    def _updated(self, event: EngineUpdated, now: float) -> list[VersionsEffect]:
        at = self._engines.get(event.engine)
        if at is None:
            return []
        target = self._target
        assert target is not None
        if event.fault:
            at.failed_at_s = now
            at.failed = JobVersion(job=event.job, store=at.loads, version=event.version)
            if at.state is EngineState.UPDATING and at.failed != target:
                # The target moved on meanwhile: nothing is known against it.
                return [self._update(event.engine, target)]
            return self._advance(event.engine, VersionSwitchTrigger.BROKE)
        at.job, at.version, at.state_hash = event.job, event.version, event.state_hash
        if (at.job, at.loads, at.version) == (target.job, target.store, target.version):
            self._served[at.job] = at.version
            return self._advance(event.engine, VersionSwitchTrigger.UPDATED)
        # The target moved on meanwhile; no turn can be open on an engine in update.
        return [self._update(event.engine, target)]

    def _retry(self, now: float) -> list[VersionsEffect]:
        effects: list[VersionsEffect] = []
        for engine, at in sorted(self._engines.items()):
            due = now >= at.failed_at_s + self._config.retry_s
            if at.state is EngineState.FAILED and due:
                effects += self._advance(engine, VersionSwitchTrigger.RETRY)
        return effects

    def _advance(
        self, engine: EngineId, trigger: VersionSwitchTrigger, *, cut_exact: bool = False
    ) -> list[VersionsEffect]:
        at, target = self._engines.get(engine), self._target
        if at is None or target is None:
            return []
        if trigger is VersionSwitchTrigger.RETARGET and at.state is EngineState.QUIESCING:
            return [self._quiesce(engine, target, cut_exact)]
        if not at.move(trigger):
            return []
        match at.state:
            case EngineState.QUIESCING:
                return [self._quiesce(engine, target, cut_exact)]
            case EngineState.UPDATING:
                return [self._update(engine, target)]
            case EngineState.SERVING:
                return [ServeEngine(engine=engine, job=at.job, version=at.version)]
            case EngineState.FAILED:
                return []

    def _quiesce(self, engine: EngineId, target: JobVersion, cut_exact: bool) -> QuiesceEngine:
        reason = f"to job {target.job} version {target.version}"
        return QuiesceEngine(engine=engine, cut_exact=cut_exact, reason=reason)

    def _update(self, engine: EngineId, to: JobVersion) -> UpdateEngine:
        self._engines[engine].loads = to.store
        known = self._hashes.get(to.job, "")
        return UpdateEngine(engine=engine, state_hash=known, **msgspec.structs.asdict(to))

    def _settle(self) -> list[VersionsEffect]:
        target = self._target
        if target is None or self._settled:
            return []
        dedicated = [at for at in self._engines.values() if at.kind is EngineKind.DEDICATED]
        serving = [at for at in dedicated if at.serves(target.job, target.version)]
        if len(serving) < max(len(dedicated), self._config.min_dedicated):
            return []
        self._settled = True
        return [SettlePublish(job=target.job, version=target.version)]
