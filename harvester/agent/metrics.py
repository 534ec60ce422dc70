"""The agent's Prometheus exports: the names, types and labels of `deploy/metrics.py`."""

from collections.abc import Iterable
from functools import cache

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from harvester.contracts.wire.stops import Stop

_RECLAIM_EDGES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

# Name, without the prefix `harvester_`: labels, and help.
_GAUGES = {
    "build_info": ("version", "Always 1; the version is a label."),
    "mode": ("slot mode", "1 for the mode in force, 0 for others."),
    "slot_state": ("slot state", "1 for the state that the slot is in, 0 for others."),
    "quarantined": ("slot", "1 while it waits for an operator."),
    "unrecorded": ("slot", "1 while journal or state cannot be written."),
    "slo_headroom_ratio": ("slot slo", "1 - recent latency / SLO; below 0 is a breach."),
    "headroom_age_seconds": ("slot slo", "Age of the newest latency behind it."),
    "grant_step_tokens": ("slot", "Token cap; 0 while closed."),
    "lent_step_tokens": ("slot", "Tokens of a guest step beside idle production; 0 is nothing."),
    "lent_share_ratio": ("slot", "Share of production's idle time that such steps may take."),
    "idle_ratio": ("slot", "Share of recent time without a production step."),
    "idle_forecast_ratio": (
        "slot horizon percentile",
        "Expected idle share of the next 10, 30 and 120 seconds.",
    ),
    "leases_active": ("slot tenant", "Leases in force."),
    "guest_step_over_ratio": ("slot", "Guest steps longer than predicted; 0.1 is expected."),
    "guest_step_percentile_ratio": (
        "slot kind percentile",
        "The guest's steps over what was predicted for them alone; 1 is expected at P90 alone.",
    ),
    "production_step_over_ratio": (
        "slot kind",
        "Production's steps longer than predicted; 0.1 is expected.",
    ),
    "production_step_percentile_ratio": (
        "slot kind percentile",
        "Production's steps, observed over predicted; 1 is expected at P90.",
    ),
    "blocking_ratio": (
        "slot kind",
        "Share of a guest step that production waits for: configured, in force, observed P99.",
    ),
    "guest_kv_tokens": ("slot state", "The guest's KV: held, retained, free and withheld."),
    "guest_memory_bytes": (
        "slot part",
        "Accelerator memory that the guest reports: weights, graphs, activations, context, KV.",
    ),
    "guest_weights_away": ("slot", "1 while its weights sleep in host memory."),
    "guest_asleep_bytes_max": (
        "slot",
        "Accelerator memory that a guest may hold while its weights sleep.",
    ),
    "guest_isolation": ("slot backend", "1 for what the guest says that bounds its steps."),
    "guest_isolation_holds": (
        "slot",
        "0 where threads of the guest do not rank below all of production's.",
    ),
    "mps_state": ("slot state", "1 for what the MPS daemon says; all 0 without consent."),
    "shared_memory_bytes": (
        "slot part",
        "Memory that guest and production share: used, limit, the guest's part and its limit.",
    ),
    "signal_age_seconds": ("slot source", "Age of the newest reading."),
    "kill_switch_engaged": ("level", "1 while it is set."),
    "slot_stopped": ("slot order", "1 for the order that binds the slot: hold or drain."),
    "interlock_known": ("interlock", "0 while its source gives no usable answer: slots are held."),
    "stop_info": (
        "slot tenant order source by reason at",
        '1 for each order to stop in force; "" is every slot or tenant.',
    ),
    "slo_objective_ratio": ("slot", "Share that must meet the SLO."),
    "error_budget_spent_ratio": ("slot", "Harvesting's misses / its allowance or allotment."),
    "guard_value": (
        "slot guard",
        "Shares (slack_law, level_*), misses (error_budget), pace (burn_*), odds of harm (proof).",
    ),
    "guard_limit": ("slot guard", "Its limit."),
    "guard_binds": ("slot guard", "1 while it reduces or stops harvesting."),
    "impact_ratio": ("slot slo bound", "Latency with grants / without, minus 1."),
    "impact_limit_ratio": ("slot", "Impact that stops harvesting."),
    "config_last_reload_successful": ("", "0 after a reload that was refused, or not whole."),
    "config_restart_needed": ("", "Fields of the configuration that wait for a restart."),
    "unsafe_experiments": ("", "1 where settings may go beyond what protects production."),
}
_COUNTERS = {
    "audit_missing_events": ("", "Audit events that could not be written."),
    "journal_missing_lines": ("slot", "Decisions that the journal lacks."),
    "admission_decisions": ("slot decision reason", "Grants written."),
    "guest_tokens": ("slot", "Tokens of the guest's steps."),
    "leases_ended": ("slot reason", "Leases ended."),
    "evictions": ("slot reason", "Guest requests aborted for production."),
    "kv_reclaims": ("slot outcome", "Shrinks of its budget that the guest owed memory for."),
    "guest_actions": (
        "slot action outcome",
        "Lifts, settles and kills of a guest: asked, done, failed.",
    ),
    "guest_prefix_tokens": (
        "slot outcome",
        "Kept for a trajectory away at its tools: used by it, or dropped.",
    ),
    "requests": ("slot", "Production requests accounted."),
    "unanswered_requests": ("slot", "Production requests that ended early without a first token."),
    "slo_misses": ("slot", "Production requests over their SLO beside a guest step."),
}


class AgentMetrics:
    """`gauge(name, *labels)` and `counter(name, *labels)` are the series of the tables above.

    Both are kept: prometheus_client's own look-up by labels costs as much as the rest of a beat.
    """

    def __init__(self, *, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._gauges = {
            name: Gauge(f"harvester_{name}", text, labels.split(), registry=self.registry)
            for name, (labels, text) in _GAUGES.items()
        }
        self._counters = {
            name: Counter(f"harvester_{name}", text, labels.split(), registry=self.registry)
            for name, (labels, text) in _COUNTERS.items()
        }
        self.lease_info = Gauge(
            "harvester_lease_info",
            "1 with the labels of the lease in force, 0 with empty ones without a lease.",
            ("slot", "tenant", "rl_job"),
            registry=self.registry,
        )
        self.reclaim_duration = Histogram(
            "harvester_reclaim_duration_seconds",
            "From the decision to close until the guest's last launched step ended.",
            ("slot",),
            registry=self.registry,
            buckets=_RECLAIM_EDGES_S,
        )
        self.steps_met = Histogram(
            "harvester_guest_steps_met",
            "The guest's steps between a production request's arrival and its first token.",
            ("slot",),
            registry=self.registry,
            buckets=(0.0, 1.0, 2.0, 3.0),
        )
        self.gauge, self.counter = cache(self._gauge), cache(self._counter)
        self.gauge("build_info", version).set(1)
        self.gauge("config_last_reload_successful").set(1)

    def stops(self, stops: Iterable[Stop]) -> None:
        """Replace the rows of `stop_info`, whose labels are texts of operators."""
        info = self._gauges["stop_info"]
        info.clear()
        for stop in stops:
            texts = (stop.slot, stop.tenant, stop.order, stop.source, stop.by, stop.reason, stop.at)
            info.labels(*texts).set(1)

    def forget(self, name: str, *labels: str) -> None:
        """Remove a gauge's series."""
        self._gauges[name].remove(*labels)
        self.gauge.cache_clear()

    def _gauge(self, name: str, *labels: str) -> Gauge:
        found = self._gauges[name]
        return found.labels(*labels) if labels else found

    def _counter(self, name: str, *labels: str) -> Counter:
        found = self._counters[name]
        return found.labels(*labels) if labels else found
