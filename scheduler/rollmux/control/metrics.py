"""Prometheus metrics of the phase control: waiting jobs, holders and faults.

Fed with every decision of the phase service, and brought up to date at a scrape. No label is a job
or a node: thousands of them may share one control; their names are in its status and in its
journal.
"""

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from harvester.contracts.ids import JobId, NodeId
from harvester.platform.process_metrics import ProcessMetrics
from scheduler.model import PhaseKind, Pool
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.rollmux.cluster.job_placement import PlacementStage
from scheduler.rollmux.cluster.runtime_events import CloseJob, PhasePolicy, PlanJob, RuntimeEffect
from scheduler.rollmux.permits.events import (
    DropPlace,
    EndPermit,
    FreeNodes,
    GrantPermit,
    PermitEndReason,
    RevokePermit,
    WarnHolder,
    WidenPermit,
)
from scheduler.rollmux.permits.job_permit import JobPermit, PermitStage
from scheduler.rollmux.planner.group_effects import PlacementDecision

_BUCKETS_S = (0.01, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600)
_DECISION_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0)
_UNKNOWN = "unknown"
_NODE_STATES = ("used", "free", "failed", "missing")
_KEPT, _OWED, _BROKEN = "kept", "owed", "broken"
_NODES_REMEMBERED = 1 << 16
"""Last jobs of nodes; forgotten together when there are too many."""


class PhaseMetrics(ProcessMetrics):
    def __init__(self) -> None:
        super().__init__("scheduler_phase")
        phase = ["phase"]
        self._jobs = self._gauge("jobs", "Jobs that are placed, by stage.", ["stage"])
        self._waiting = self._gauge("permits_waiting", "Workers that wait for a permit.", phase)
        self._held = self._gauge("permits_held", "Permits in force.", phase)
        self._longest = self._gauge(
            "longest_wait_seconds", "Longest wait of a worker that waits now.", phase
        )
        self._nodes = self._gauge("nodes_held", "Nodes covered by a permit.", phase)
        self._starts = self._counter(
            "starts_total", "Permits granted; cold: the first of this phase in its process.",
            ["phase", "start"],
        )  # fmt: skip
        self._switches = self._counter(
            "switches_total", "Changes of a node from one job to another.", phase
        )
        self._ended = self._counter(
            "permits_ended_total",
            "Permits ended, by reason; silent: the holder sent no beat for lease_s.",
            ["phase", "reason"],
        )
        self._overruns = self._counter(
            "overruns_total", "Phases that took longer than their bound.", phase
        )
        self._revocations = self._counter(
            "revocations_total", "Permits revoked from a phase that overran while others waited.",
            phase,
        )  # fmt: skip
        self._tails = self._counter(
            "tails_moved_total", "Tails that left nodes to waiting jobs.", phase
        )
        self._wait_s = self._histogram(
            "wait_seconds", "Time from the request to the permit.", phase, buckets=_BUCKETS_S
        )
        self._hold_s = self._histogram(
            "hold_seconds", "Time from a permit to its end.", phase, buckets=_BUCKETS_S
        )
        self.plan = PlanMetrics(self.registry)
        self._last_job: dict[NodeId, JobId] = {}
        self._processes: dict[JobId, tuple[str, set[PhaseKind]]] = {}
        for kind in PhaseKind:
            self._begin(kind)

    def resume(self, policy: PhasePolicy) -> None:
        """Counts processes and nodes from before a restart as known."""
        for permit in _permits(policy):
            self._last_job |= dict.fromkeys(permit.nodes, permit.job)
            if permit.holder:
                kinds = {phase.kind for phase in permit.terms.phases}
                self._processes[permit.job] = (permit.holder, kinds)

    def decided(self, effects: Iterable[RuntimeEffect], policy: PhasePolicy, *, now: float) -> None:
        """`policy`: its state after `effects`."""
        for effect in effects:
            match effect:
                case GrantPermit():
                    self._granted(effect, policy.permit(effect.job), now)
                case WidenPermit():
                    self._on_nodes(effect.job, effect.nodes, _kind(policy, effect.job))
                case FreeNodes():
                    self._tails.labels(_kind(policy, effect.job)).inc()
                case WarnHolder():
                    self._overruns.labels(_kind(policy, effect.job)).inc()
                case RevokePermit():
                    self._revocations.labels(_kind(policy, effect.job)).inc()
                case EndPermit():
                    self._end(effect, policy.permit(effect.job), now)
                case DropPlace(forgotten=True):
                    self._processes.pop(effect.job, None)
                case PlanJob() | CloseJob():
                    self.plan.decided(effect)
                case _:
                    pass

    def show(self, policy: PhasePolicy, *, now: float) -> None:
        """Brings the gauges up to date."""
        job_permits = tuple(_permits(policy))
        stages = Tally(each.stage for each in job_permits)
        for stage in PermitStage:
            self._jobs.labels(stage).set(stages[stage])
        for kind in PhaseKind:
            waiting = [each for each in job_permits if each.claimed and each.kind is kind]
            held = [each for each in job_permits if each.holding and each.kind is kind]
            longest_s = max((now - each.enqueued_s for each in waiting), default=0.0)
            self._waiting.labels(kind).set(len(waiting))
            self._longest.labels(kind).set(max(0.0, longest_s))
            self._held.labels(kind).set(len(held))
            self._nodes.labels(kind).set(sum(len(each.nodes) for each in held))

    def _granted(self, grant: GrantPermit, permit: JobPermit | None, now: float) -> None:
        holder, kinds = self._processes.get(grant.job, ("", set()))
        if holder != grant.holder:
            kinds = set()
        self._starts.labels(grant.kind, "warm" if grant.kind in kinds else "cold").inc()
        self._processes[grant.job] = (grant.holder, kinds | {grant.kind})
        self._on_nodes(grant.job, grant.nodes, grant.kind)
        if permit is not None:
            self._wait_s.labels(grant.kind).observe(max(0.0, now - permit.enqueued_s))

    def _on_nodes(self, job: JobId, nodes: tuple[NodeId, ...], kind: str) -> None:
        others = sum(self._last_job.get(node, job) != job for node in nodes)
        self._switches.labels(kind).inc(others)
        if len(self._last_job) > _NODES_REMEMBERED:
            self._last_job.clear()
        self._last_job |= dict.fromkeys(nodes, job)

    def _end(self, end: EndPermit, permit: JobPermit | None, now: float) -> None:
        self._ended.labels(end.kind, end.ended).inc()
        if permit is not None:
            self._hold_s.labels(end.kind).observe(max(0.0, now - permit.started_s))

    def _begin(self, kind: PhaseKind) -> None:
        """Creates every series before the first scrape: an increase needs a zero before it."""
        for start in ("cold", "warm"):
            self._starts.labels(kind, start)
        for reason in PermitEndReason:
            self._ended.labels(kind, reason)
        for counter in (self._switches, self._overruns, self._revocations, self._tails):
            counter.labels(kind)
        for histogram in (self._wait_s, self._hold_s):
            histogram.labels(kind)


class PlanMetrics:
    """Placed jobs, their cost and endangered SLOs under a planning control."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"scheduler_phase_plan_{name}", text, labels, registry=registry)

        self._jobs = gauge("jobs", "Submitted jobs, by state.", ("stage",))
        self._nodes = gauge(
            "nodes", "Nodes, by use; missing: failed and not replaced yet.", ("pool", "state")
        )
        self._groups = gauge("groups", "Groups of jobs that share nodes.")
        self._price = gauge("price_per_hour", "Dollars an hour for the nodes in use.")
        self._slowdown = gauge(
            "worst_slowdown_ratio", "Largest slow-down of a placed job, over its SLO."
        )
        self._slos = gauge("slos", "Placed jobs within their SLO, and beyond it.", ("state",))
        self._longest = gauge("longest_wait_seconds", "Longest wait of a job without nodes.")
        self._credit = gauge(
            "least_credit_seconds", "Smallest delay that a placed job can still absorb."
        )
        self._decisions = Counter(
            "scheduler_phase_plan_decisions_total",
            "Decisions of the planner, by kind.",
            ("decision",),
            registry=registry,
        )
        self._ended = Counter(
            "scheduler_phase_plan_slos_ended_total",
            "Jobs that ended after an iteration, by whether their SLO was kept.",
            ("state",),
            registry=registry,
        )
        self.decision_s = Histogram(
            "scheduler_phase_plan_decision_seconds",
            "Time of the planner for an event; the control does not reply meanwhile.",
            registry=registry,
            buckets=_DECISION_BUCKETS_S,
        )
        for decision in PlacementDecision:
            self._decisions.labels(decision)
        for state in (_KEPT, _BROKEN):
            self._ended.labels(state)

    def decided(self, effect: PlanJob | CloseJob) -> None:
        if isinstance(effect, PlanJob):
            self._decisions.labels(effect.decision).inc()
        else:
            self._ended.labels(_KEPT if effect.kept else _BROKEN).inc()

    def show(self, cluster: ClusterPolicy, *, now: float) -> None:
        stages = Tally(placed.stage for placed in cluster.placements.values())
        for stage in PlacementStage:
            self._jobs.labels(stage).set(stages[stage])
        for pool in (Pool.ROLLOUT, Pool.TRAINING):
            counts = cluster.fleet.counts(pool)
            for state in _NODE_STATES:
                self._nodes.labels(pool, state).set(counts[state])
        groups = cluster.planner.table
        self._groups.set(sum(bool(group.pinned) for group in groups.groups.values()))
        self._price.set(groups.price_per_hour())
        facts = cluster.planner.facts.values()
        credits_s = [one.settled_credit_s(now) for one in facts]
        owed = sum(credit_s < 0 for credit_s in credits_s)
        self._slowdown.set(
            max((one.settled_slowdown(now) / one.account.slo for one in facts), default=0.0)
        )
        self._credit.set(min(credits_s, default=0.0))
        self._slos.labels(_KEPT).set(len(credits_s) - owed)
        self._slos.labels(_OWED).set(owed)
        queued = [one for one in cluster.placements.values() if one.stage is PlacementStage.QUEUED]
        self._longest.set(max((now - one.submitted_s for one in queued), default=0.0))


def _permits(policy: PhasePolicy) -> Iterable[JobPermit]:
    found = (policy.permit(job) for job in policy.jobs)
    return (each for each in found if each is not None)


def _kind(policy: PhasePolicy, job: JobId) -> str:
    permit = policy.permit(job)
    return _UNKNOWN if permit is None or permit.kind is None else permit.kind
