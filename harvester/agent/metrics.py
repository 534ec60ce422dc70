"""What the agent exports to Prometheus: the names, types and labels of `deploy/metrics.py`."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

_RECLAIM_EDGES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class AgentMetrics:
    def __init__(self, *, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"harvester_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"harvester_{name}", text, labels, registry=registry)

        gauge("build_info", "Always 1; the version is a label.", "version").labels(version).set(1)
        self.mode = gauge("mode", "1 for the slot's state, 0 for others.", "slot", "mode")
        self.quarantined = gauge("quarantined", "1 while it waits for an operator.", "slot")
        self.headroom = gauge(
            "slo_headroom_ratio", "1 - recent latency / SLO; below 0 is a breach.", "slot", "slo"
        )
        self.decisions = counter(
            "admission_decisions", "Grants written.", "slot", "decision", "reason"
        )
        self.step_tokens = gauge("grant_step_tokens", "Token cap; 0 while closed.", "slot")
        self.guest_tokens = counter("guest_tokens", "Tokens of the guest's steps.", "slot")
        self.idle = gauge("idle_ratio", "Share of recent time without a production step.", "slot")
        self.leases_active = gauge("leases_active", "Leases in force.", "slot", "tenant")
        self.leases_ended = counter("leases_ended", "Leases ended.", "slot", "reason")
        self.evictions = counter(
            "evictions", "Guest requests aborted for production.", "slot", "reason"
        )
        self.reclaim = Histogram(
            "harvester_reclaim_duration_seconds",
            "From the decision to close until the guest's last launched step ended.",
            ("slot",),
            registry=registry,
            buckets=_RECLAIM_EDGES_S,
        )
        self.signal_age = gauge(
            "signal_age_seconds", "Age of the newest reading.", "slot", "source"
        )
        self.kill_switch = gauge("kill_switch_engaged", "1 while it is set.", "level")
        self.requests = counter("requests", "Production requests accounted.", "slot")
        self.misses = counter(
            "slo_misses", "Production requests over their SLO beside a guest step.", "slot"
        )
        self.objective = gauge("slo_objective_ratio", "Share that must meet the SLO.", "slot")
        self.budget_spent = gauge(
            "error_budget_spent_ratio", "Harvesting's misses / its allowance in 28 d.", "slot"
        )
        self.impact = gauge(
            "impact_ratio", "Latency with grants / without, minus 1.", "slot", "slo", "bound"
        )
        self.impact_limit = gauge("impact_limit_ratio", "Impact that stops harvesting.", "slot")
        self.reload_successful = gauge(
            "config_last_reload_successful", "0 after a reload that was refused."
        )
        self.reload_successful.set(1)
