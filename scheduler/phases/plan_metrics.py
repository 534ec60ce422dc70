"""What a planning control tells Prometheus: who has a place, what it costs, whose promise is short.

Brought up to date at a scrape. Labels are stage, pool, state and decision: never a job or a node.
"""

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge

from scheduler.policy.cluster.cluster import ClusterPolicy, Decision
from scheduler.policy.cluster.stays import StayStage
from scheduler.policy.model import Pool

_STATES = ("used", "free", "failed", "missing")


class PlanMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"scheduler_phase_plan_{name}", text, labels, registry=registry)

        self._jobs = gauge("jobs", "Submitted jobs, by how they stand.", ("stage",))
        self._nodes = gauge(
            "nodes", "Nodes, by use; missing: failed and not replaced yet.", ("pool", "state")
        )
        self._groups = gauge("groups", "Groups of jobs that share nodes.")
        self._price = gauge("price_per_hour", "Dollars an hour for the nodes in use.")
        self._slowdown = gauge(
            "worst_slowdown_ratio", "Largest slow-down of a placed job, over its SLO."
        )
        self._credit = gauge(
            "least_credit_seconds", "Smallest delay that a placed job can still absorb."
        )
        self._decisions = Counter(
            "scheduler_phase_plan_decisions_total",
            "What the planner has asked for.",
            ("decision",),
            registry=registry,
        )
        for decision in Decision:
            self._decisions.labels(decision)
        self._counted: Tally[Decision] = Tally()

    def show(self, cluster: ClusterPolicy, *, now: float) -> None:
        stages = Tally(stay.stage for stay in cluster.stays.values())
        for stage in StayStage:
            self._jobs.labels(stage).set(stages[stage])
        for pool in (Pool.ROLLOUT, Pool.TRAINING):
            counts = cluster.fleet.counts(pool)
            for state in _STATES:
                self._nodes.labels(pool, state).set(counts[state])
        book = cluster.planner.book
        self._groups.set(sum(bool(cell.pinned) for cell in book.cells.values()))
        self._price.set(book.price_per_hour())
        accounts = [facts.account for facts in cluster.planner.facts.values()]
        ratios = [(now - one.began_s) / max(one.solo_s, 1e-3) / one.slo for one in accounts]
        self._slowdown.set(max(ratios, default=0.0))
        self._credit.set(min((one.credit_s(now) for one in accounts), default=0.0))
        for decision, count in cluster.decisions.items():
            self._decisions.labels(decision).inc(count - self._counted[decision])
            self._counted[decision] = count
