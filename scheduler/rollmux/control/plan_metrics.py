"""Prometheus metrics of a planning control: placed jobs, their cost, endangered SLOs.

Brought up to date at a scrape. Labels are stage, pool, state and decision: never a job or a node.
"""

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from scheduler.model import Pool
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.rollmux.cluster.job_placement import PlacementStage
from scheduler.rollmux.cluster.plan_events import CloseJob, PlacementDecision, PlanJob

_STATES = ("used", "free", "failed", "missing")
_KEPT, _OWED, _BROKEN = "kept", "owed", "broken"
_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0)


class PlanMetrics:
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
        self._promises = gauge(
            "promises", "Placed jobs within their SLO, and beyond it.", ("state",)
        )
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
            "scheduler_phase_plan_promises_ended_total",
            "Jobs that ended after an iteration, by whether their SLO was kept.",
            ("promise",),
            registry=registry,
        )
        self.decision_s = Histogram(
            "scheduler_phase_plan_decision_seconds",
            "Time of the planner for an event; the control does not reply meanwhile.",
            registry=registry,
            buckets=_BUCKETS_S,
        )
        for decision in PlacementDecision:
            self._decisions.labels(decision)
        for promise in (_KEPT, _BROKEN):
            self._ended.labels(promise)

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
            for state in _STATES:
                self._nodes.labels(pool, state).set(counts[state])
        book = cluster.planner.book
        self._groups.set(sum(bool(cell.pinned) for cell in book.cells.values()))
        self._price.set(book.price_per_hour())
        facts = cluster.planner.facts.values()
        credits_s = [one.settled_credit_s(now) for one in facts]
        owed = sum(credit_s < 0 for credit_s in credits_s)
        self._slowdown.set(
            max((one.settled_slowdown(now) / one.account.slo for one in facts), default=0.0)
        )
        self._credit.set(min(credits_s, default=0.0))
        self._promises.labels(_KEPT).set(len(credits_s) - owed)
        self._promises.labels(_OWED).set(owed)
        queued = [one for one in cluster.placements.values() if one.stage is PlacementStage.QUEUED]
        self._longest.set(max((now - one.submitted_s for one in queued), default=0.0))
