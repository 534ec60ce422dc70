"""Prometheus metrics of the gateway. Touched a few times per turn, never per token."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from harvester.distribution import rosemux_version
from harvester.platform import certificate_expiry

_SWITCH_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        job, engine = ["rl_job"], ["engine", "kind"]
        self._info = self._gauge("build_info", "Always 1; the version is a label.", ["version"])
        self._info.labels(rosemux_version()).set(1)
        self.turns_queued = self._gauge("turns_queued", "Turns waiting for an engine.", job)
        self.turns_deferred = self._gauge("turns_deferred", "Turns whose pin no engine meets.", job)
        self.paused_s = self._gauge(
            "job_paused_seconds", "Age of the job's pause; 0 while it is not paused.", job
        )
        self.turns_running = self._gauge("turns_running", "Turns on an engine.", engine)
        self.turns = self._counter("turns", "Turns ended, by outcome.", ["rl_job", "outcome"])
        self.interruptions = self._counter(
            "interruptions",
            "Turns with tokens that lost their engine, by cause, and whether they went on.",
            ["rl_job", "cause", "outcome"],
        )
        self.trajectories = self._counter(
            "trajectories",
            "Trajectories started, lost, duplicated, migrated, undelivered, or answered again.",
            ["rl_job", "outcome"],
        )
        self.generated_tokens = self._counter(
            "generated_tokens", "Tokens given to RL jobs.", ["rl_job", *engine]
        )
        self.stale_tokens = self._counter("stale_tokens", "Tokens outside their version pin.", job)
        self.engine_up = self._gauge("engine_up", "1 while the engine takes turns.", engine)
        self.engine_version = self._gauge(
            "engine_weight_version", "Version that the engine serves.", engine
        )
        self.version = self._gauge("weight_version", "Newest version that was announced.", job)
        self.switch_s = Histogram(
            "scheduler_version_switch_duration_seconds",
            "One engine's switch, from its last old token to serving again.",
            ["kind"],
            buckets=_SWITCH_BUCKETS_S,
            registry=self.registry,
        )
        self.staging_s = Histogram(
            "scheduler_version_staging_duration_seconds",
            "One engine's preparation of a version while it samples, by outcome.",
            ["kind", "outcome"],
            buckets=(*_SWITCH_BUCKETS_S, 300, 600, 1800),
            registry=self.registry,
        )
        self.service_budget = self._gauge(
            "service_misses",
            "Misses of 28 days: budget, spent, outstanding.",
            ["service", "part"],
        )
        self.answers_bytes = self._gauge("answers_kept_bytes", "Memory of answers kept.", [])
        self.unrecorded = self._gauge(
            "unrecorded", "1 while a journal or the state file lacks something.", []
        )
        self.journal_missing = self._counter(
            "journal_missing_lines", "Decisions that the journals lack.", []
        )
        self.journal_missing_before = 0
        self.leases_held = self._gauge("leases_held", "Leases in use.", job)
        self.agent_up = self._gauge(
            "agent_up", "1 while the agent's slots may be used; else see the log.", ["agent"]
        )
        self.stop_missing = self._gauge(
            "stop_missing", "1 while the agent may not know an order to stop.", ["agent"]
        )
        self.loop_lag_s = Histogram(
            "scheduler_loop_lag_seconds",
            "Lateness of the event loop, four times a second and more.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
            registry=self.registry,
        )
        self.lease_slack_s = self._gauge(
            "lease_slack_seconds", "Least time that is left to use a lease.", []
        )
        self._certificates = self._gauge(
            certificate_expiry.NAME, certificate_expiry.HELP, [*certificate_expiry.LABELS]
        )

    def render(self) -> bytes:
        certificate_expiry.show_expiries(self._certificates)
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str, labels: list[str]) -> Gauge:
        return Gauge(f"scheduler_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"scheduler_{name}", text, labels, registry=self.registry)
