"""The phases of all jobs as one state machine: which nodes each job is on, and which phase runs.

Calls of jobs and operators go to the permits or to the plan. Granted and ended permits teach the
plan, and its effects on permits are applied in the same decision. A service, a Ray actor and a
simulator are shells around it: they bring events and times, and carry out the effects.
"""

from typing import Any, ClassVar

import msgspec

from harvester.contracts.ids import JobId
from scheduler.model import PhaseKind
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.rollmux.cluster.cluster_record import ClusterRecord, restore, snapshot
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.cluster.job_placement import PlacementStage
from scheduler.rollmux.cluster.permit_updates import Removal
from scheduler.rollmux.cluster.runtime_events import NodeReport, RuntimeEffect, RuntimeEvent, Submit
from scheduler.rollmux.permits.completion import CompletionCurve
from scheduler.rollmux.permits.events import (
    Beat,
    ControlResumed,
    EndPermit,
    Enter,
    Forget,
    GrantPermit,
    Leave,
    PermitEffect,
    PermitEndReason,
    Refuse,
    Register,
    TimeElapsed,
    Unloaded,
    Withdraw,
)
from scheduler.rollmux.permits.job_permit import JobPermit
from scheduler.rollmux.permits.permits import PermitPolicy
from scheduler.rollmux.permits.terms import JobTerms, PermitsConfig
from scheduler.rollmux.planner.planner import GroupPlanner


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    permits: PermitsConfig
    cluster: ClusterConfig


class PhaseRuntime:
    NAME: ClassVar[str] = "scheduler.policy.cluster"
    SAMPLE: ClassVar[Any] = RuntimeEvent

    def __init__(self, config: RuntimeConfig, planner: GroupPlanner | None = None) -> None:
        """`planner` is another one than the settings give."""
        self.config = config
        self.permits = PermitPolicy(config.permits)
        self.cluster = ClusterPolicy(config.cluster, self.permits, planner)
        self._reviewed_s: float | None = None
        self._last_call_s: dict[JobId, float] = {}
        """Time of the last call of each placed job."""
        self._effects: list[RuntimeEffect] = []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PhaseRuntime":
        return cls(msgspec.convert(config, RuntimeConfig))

    def snapshot(self) -> dict[str, Any]:
        return {
            "permits": self.permits.snapshot(),
            "plan": snapshot(self.cluster),
            "reviewed_s": self._reviewed_s,
            "last_call_s": dict(self._last_call_s),
        }

    def restore(self, kept: dict[str, Any]) -> None:
        """Raises ValueError where the records contradict each other."""
        self.permits.restore(kept["permits"])
        restore(self.cluster, msgspec.convert(kept["plan"], ClusterRecord))
        self.permits.close(self.cluster.fleet.failed)
        # A state file has neither: after a restart every job gets its full time again.
        self._reviewed_s = kept.get("reviewed_s")
        self._last_call_s = dict(kept.get("last_call_s", {}))

    @property
    def counters(self) -> tuple[int, int]:
        """Last epoch and last ticket of the permits; neither is ever given again."""
        return self.permits.counters

    @property
    def jobs(self) -> tuple[JobId, ...]:
        """All submitted jobs."""
        return tuple(self.cluster.placements)

    def permit(self, job: JobId) -> JobPermit | None:
        """The job's record; read-only for callers."""
        return self.permits.permit(job)

    def ahead(self, job: JobId, *, now: float) -> int:
        """Jobs that come before this one on its nodes."""
        return self.permits.ahead(job, now=now)

    def due_s(self) -> float:
        """Time at which `TimeElapsed` will next change something."""
        if self._reviewed_s is None:
            return self.permits.due_s()
        return min(self.permits.due_s(), self._reviewed_s + self.config.cluster.review_s)

    def observe(self, event: RuntimeEvent, *, now: float) -> tuple[RuntimeEffect, ...]:
        self._effects = []
        if self._reviewed_s is None:
            self._reviewed_s = now
        self._record_call(event, now)
        match event:
            case Submit():
                self.cluster.submit(event.spec, now=now, holder=event.holder)
            case NodeReport():
                self.cluster.report_node(event.node, failed=event.failed, now=now)
            case Forget(job=job) if job in self.cluster.placements:
                self.cluster.end_job(job, now=now)
            case Register(terms=terms):
                reason = "this control plans: submit the job, and it is placed"
                self._effects.append(Refuse(job=terms.job, reason=reason))
            case Withdraw(job=job) if self._queued_by(job) == event.holder:
                self.cluster.end_job(job, now=now)
            case Enter():
                self._request(event, now)
            case TimeElapsed():
                self._pass_time(event, now)
            case ControlResumed():
                self._follow(self.permits.observe(event, now=now), now)
                self.cluster.resume(now=now)
            case _:
                self._follow(self.permits.observe(event, now=now), now)
        self._carry_out(now)
        return tuple(self._effects)

    def held_up(self, job: JobId, kind: PhaseKind) -> str:
        """Why a known job cannot request a permit for that phase now; empty if it can."""
        placed = self.cluster.placements.get(job)
        if placed is None:
            return ""
        terms = self.cluster.current_terms(placed)
        permit = self.permits.permit(job)
        if permit is not None and permit.holding:
            return ""
        if terms is not None and terms.phase(kind) is not None and not placed.changed:
            return ""
        if placed.changed:
            return f"its nodes have changed: {placed.reason}"
        if placed.stage is PlacementStage.QUEUED:
            return f"it waits for a placement: {placed.reason}"
        if placed.at is not None:
            return f"{placed.reason}, and none is free yet"
        return "it waits for room on its new nodes"

    def _request(self, event: Enter, now: float) -> None:
        placed = self.cluster.placements.get(event.job)
        if placed is not None and (placed.notified or placed.arrived_s is not None):
            self.cluster.request_phase(event.job, event.kind, now=now)
            self._carry_out(now)
        reason = self.held_up(event.job, event.kind)
        if reason:
            changed = placed is not None and placed.changed
            self._effects.append(Refuse(job=event.job, reason=reason, unknown=changed))
        else:
            self._follow(self.permits.observe(event, now=now), now)

    def _pass_time(self, event: TimeElapsed, now: float) -> None:
        self._follow(self.permits.observe(event, now=now), now)
        if now - (self._reviewed_s or 0.0) >= self.config.cluster.review_s:
            self._reviewed_s = now
            self.cluster.review(now=now)
            self._carry_out(now)
            for job in self._silent(now):
                self.cluster.end_job(job, now=now)
                self._carry_out(now)

    def _follow(self, effects: tuple[PermitEffect, ...], now: float) -> None:
        """Teaches the plan the granted and ended permits."""
        self._effects += effects
        for effect in effects:
            match effect:
                case GrantPermit(job=job):
                    self.permits.allow_load(job, self.cluster.begin_phase(job))
                case EndPermit(ended=PermitEndReason.DONE):
                    self.cluster.complete_phase(effect, self._curve(effect), now=now)
                case EndPermit():
                    self.cluster.lose_phase(effect)
                case _:
                    continue
            self._carry_out(now)

    def _carry_out(self, now: float) -> None:
        """Applies the plan's effects to the permits."""
        self.permits.close(self.cluster.fleet.failed)
        for effect in self.cluster.take_effects():
            match effect:
                case JobTerms():
                    self._follow(self.permits.register(effect, now=now), now)
                case Removal(job=job, for_good=for_good):
                    self._follow(self.permits.remove(job, for_good=for_good, now=now), now)
                case _:
                    self._effects.append(effect)

    def _curve(self, end: EndPermit) -> CompletionCurve | None:
        """Completion curve of the job's rollouts, once enough of them were seen."""
        permit = self.permits.permit(end.job)
        curve = None if permit is None else permit.curves.get(end.kind)
        return curve if curve is not None and curve.is_known else None

    def _record_call(self, event: RuntimeEvent, now: float) -> None:
        match event:
            case Submit(spec=given):
                self._last_call_s[given.job] = now
            case Enter() | Withdraw() | Beat() | Leave() | Unloaded() if (
                event.job in self.cluster.placements
            ):
                self._last_call_s[event.job] = now
            case ControlResumed():
                self._last_call_s = dict.fromkeys(self.cluster.placements, now)
            case _:
                pass

    def _queued_by(self, job: JobId) -> str | None:
        """The process that waits for the job's placement; None if the job waits for none."""
        placed = self.cluster.placements.get(job)
        return placed.holder if placed and placed.stage is PlacementStage.QUEUED else None

    def _silent(self, now: float) -> list[JobId]:
        """Jobs that have been silent longer than `gone_s`; one that waits for a placement and has
        no process may be silent."""
        calling = [
            job
            for job, placed in self.cluster.placements.items()
            if placed.holder or placed.stage is not PlacementStage.QUEUED
        ]
        self._last_call_s = {job: self._last_call_s.get(job, now) for job in calling}
        return [job for job in calling if now - self._last_call_s[job] > self.config.cluster.gone_s]
