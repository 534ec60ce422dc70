"""The agent's Prometheus exports: the names, types and labels of `deploy/metrics.py`."""

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
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._gauge("build_info", "Always 1; the version is a label.", "version").labels(
            version
        ).set(1)
        self.mode = self._gauge("mode", "1 for the mode in force, 0 for others.", "slot", "mode")
        self.state = self._gauge(
            "slot_state", "1 for the state that the slot is in, 0 for others.", "slot", "state"
        )
        self.quarantined = self._gauge("quarantined", "1 while it waits for an operator.", "slot")
        self.unrecorded = self._gauge(
            "unrecorded", "1 while journal or state cannot be written.", "slot"
        )
        self.missing_lines = self._counter(
            "journal_missing_lines", "Decisions missing in the journal.", "slot"
        )
        self.headroom = self._gauge(
            "slo_headroom_ratio", "1 - recent latency / SLO; below 0 is a breach.", "slot", "slo"
        )
        self.decisions = self._counter(
            "admission_decisions", "Grants written.", "slot", "decision", "reason"
        )
        self.step_tokens = self._gauge("grant_step_tokens", "Token cap; 0 while closed.", "slot")
        self.guest_tokens = self._counter("guest_tokens", "Tokens of the guest's steps.", "slot")
        self.idle = self._gauge(
            "idle_ratio", "Share of recent time without a production step.", "slot"
        )
        self._describe_leases()
        self._describe_steps()
        self._describe_guest()
        self._describe_sharing()
        self._describe_accounts()

    def _describe_leases(self) -> None:
        self.leases_active = self._gauge("leases_active", "Leases in force.", "slot", "tenant")
        self.leases_ended = self._counter("leases_ended", "Leases ended.", "slot", "reason")
        self.evictions = self._counter(
            "evictions", "Guest requests aborted for production.", "slot", "reason"
        )
        self.reclaim = Histogram(
            "harvester_reclaim_duration_seconds",
            "From the decision to close until the guest's last launched step ended.",
            ("slot",),
            registry=self.registry,
            buckets=_RECLAIM_EDGES_S,
        )
        self.kv_reclaims = self._counter(
            "kv_reclaims",
            "Cuts of its KV budget after which the guest had to give memory back.",
            "slot",
            "outcome",
        )

        self.guest_actions = self._counter(
            "guest_actions",
            "Lifts, settles and kills of a guest: requested, done, failed.",
            "slot",
            "action",
            "outcome",
        )

    def _describe_steps(self) -> None:
        self.step_over = self._gauge(
            "guest_step_over_ratio",
            "Share of guest steps longer than predicted; the goal is 0.1.",
            "slot",
        )
        self.guest_percentiles = self._gauge(
            "guest_step_percentile_ratio",
            "The guest's steps, observed over predicted; the goal is 1 at P90 without production.",
            "slot",
            "kind",
            "percentile",
        )
        self.production_over = self._gauge(
            "production_step_over_ratio",
            "Share of production's steps longer than predicted; the goal is 0.1.",
            "slot",
            "kind",
        )
        self.production_percentiles = self._gauge(
            "production_step_percentile_ratio",
            "Production's steps, observed over predicted; the goal is 1 at P90.",
            "slot",
            "kind",
            "percentile",
        )
        self.blocking = self._gauge(
            "blocking_ratio",
            "Share of a guest step that production waits for: configured, in force, observed P99.",
            "slot",
            "kind",
        )

    def _describe_guest(self) -> None:
        self.kv = self._gauge(
            "guest_kv_tokens",
            "Tokens of the guest's KV: held, retained, free, withheld.",
            "slot",
            "state",
        )
        self.prefixes = self._counter(
            "guest_prefix_tokens",
            "Kept for a trajectory away at its tools: used by it, or dropped.",
            "slot",
            "outcome",
        )
        self.memory = self._gauge(
            "guest_memory_bytes",
            "Accelerator memory by the guest's report: weights, graphs, activations, context, KV.",
            "slot",
            "part",
        )
        self.weights_away = self._gauge(
            "guest_weights_away", "1 while its weights sleep in host memory.", "slot"
        )
        self.asleep_max = self._gauge(
            "guest_asleep_bytes_max",
            "Accelerator memory that a guest may hold while its weights sleep.",
            "slot",
        )

    def _describe_sharing(self) -> None:
        self.isolation = self._gauge(
            "guest_isolation",
            "1 for the isolation backend that the guest reports.",
            "slot",
            "backend",
        )
        self.isolation_holds = self._gauge(
            "guest_isolation_holds",
            "0 where threads of the guest do not rank below all of production's.",
            "slot",
        )
        self.mps = self._gauge(
            "mps_state",
            "1 for the state of the MPS daemon; all 0 without consent.",
            "slot",
            "state",
        )
        self.shared_memory = self._gauge(
            "shared_memory_bytes",
            "Memory that guest and production share: used, limit, the guest's part and its limit.",
            "slot",
            "part",
        )

    def _describe_accounts(self) -> None:
        self.signal_age = self._gauge(
            "signal_age_seconds", "Age of the newest reading.", "slot", "source"
        )
        self.kill_switch = self._gauge("kill_switch_engaged", "1 while it is set.", "level")
        self.requests = self._counter("requests", "Production requests accounted.", "slot")
        self.misses = self._counter(
            "slo_misses", "Production requests over their SLO beside a guest step.", "slot"
        )
        self.objective = self._gauge("slo_objective_ratio", "Share that must meet the SLO.", "slot")
        self.budget_spent = self._gauge(
            "error_budget_spent_ratio", "Harvesting's misses / its allowance in 28 d.", "slot"
        )
        self.impact = self._gauge(
            "impact_ratio", "Latency with grants / without, minus 1.", "slot", "slo", "bound"
        )
        self.impact_limit = self._gauge(
            "impact_limit_ratio", "Impact that stops harvesting.", "slot"
        )
        self.reload_successful = self._gauge(
            "config_last_reload_successful", "0 after a refused or partial reload."
        )
        self.reload_successful.set(1)
        self.restart_needed = self._gauge(
            "config_restart_needed", "Changed configuration fields that need a restart."
        )
        self.unsafe_experiments = self._gauge(
            "unsafe_experiments", "1 where settings may exceed the limits that protect production."
        )

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"harvester_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"harvester_{name}", text, labels, registry=self.registry)
