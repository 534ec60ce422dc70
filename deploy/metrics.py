"""Every metric that the rules and the dashboard rest on: name, type, labels, meaning, exporter.

Data only. The agent's stand in its own table; tests hold all against the rules, the dashboard and
what agent and gateway export.
Labels are those that the exporter sets; `job` and `instance` come from the scraper, so an RL job
is `rl_job` here.
"""

from dataclasses import dataclass
from enum import StrEnum

from harvester.agent.metrics import COUNTERS, GAUGES, HISTOGRAMS
from harvester.platform import certificate_expiry


class MetricType(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Exporter(StrEnum):
    AGENT = "agent"
    GATEWAY = "gateway"
    PHASES = "phases"
    WEIGHTS = "weights"
    VLLM = "vllm"
    PROMETHEUS = "prometheus"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    """The name in Prometheus: a counter with `_total`, a histogram without its suffixes."""
    kind: MetricType
    labels: tuple[str, ...]
    help: str
    exported_by: Exporter

    @property
    def series(self) -> tuple[str, ...]:
        """Names that an expression may use."""
        if self.kind is MetricType.HISTOGRAM:
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))
        return (self.name,)


def _agent(name: str, kind: MetricType, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"harvester_{name}", kind, labels, text, Exporter.AGENT)


def _gateway(name: str, kind: MetricType, labels: str, text: str) -> Metric:
    return Metric(f"scheduler_{name}", kind, tuple(labels.split()), text, Exporter.GATEWAY)


def _phase(name: str, kind: MetricType, labels: str, text: str) -> Metric:
    return Metric(f"scheduler_phase_{name}", kind, tuple(labels.split()), text, Exporter.PHASES)


def _weights(name: str, kind: MetricType, labels: str, text: str) -> Metric:
    return Metric(f"weightsync_{name}", kind, tuple(labels.split()), text, Exporter.WEIGHTS)


def _vllm(name: str, kind: MetricType, text: str, labels: str = "model_name engine") -> Metric:
    return Metric(f"vllm:{name}", kind, tuple(labels.split()), text, Exporter.VLLM)


_COUNTER, _GAUGE, _HISTOGRAM = MetricType
_CERTIFICATES = (
    certificate_expiry.NAME,
    _GAUGE,
    *certificate_expiry.LABELS,
    certificate_expiry.HELP,
)
_AGENT = (
    *(_agent(name, _GAUGE, *entry) for name, entry in GAUGES.items()),
    *(_agent(f"{name}_total", _COUNTER, *entry) for name, entry in COUNTERS.items()),
    *(_agent(name, _HISTOGRAM, *entry) for name, entry in HISTOGRAMS.items()),
)

_GATEWAY = (
    _gateway("build_info", _GAUGE, "version", "Always 1; the version is a label."),
    _gateway("turns_deferred", _GAUGE, "rl_job", "Turns whose pin no engine meets."),
    _gateway("turns_queued", _GAUGE, "rl_job", "Turns waiting for an engine."),
    _gateway(
        "job_paused_seconds", _GAUGE, "rl_job", "Age of the job's pause; 0 while it is not paused."
    ),
    _gateway("turns_running", _GAUGE, "engine kind", "Turns on an engine."),
    _gateway("turns_total", _COUNTER, "rl_job outcome", "Turns ended, by outcome."),
    _gateway(
        "interruptions_total",
        _COUNTER,
        "rl_job cause outcome",
        "Turns with tokens that lost their engine, by cause, and whether they went on.",
    ),
    _gateway(
        "trajectories_total",
        _COUNTER,
        "rl_job outcome",
        "Trajectories started, lost, duplicated, migrated, undelivered, or answered again.",
    ),
    _gateway("generated_tokens_total", _COUNTER, "rl_job engine kind", "Tokens given to RL jobs."),
    _gateway("stale_tokens_total", _COUNTER, "rl_job", "Tokens outside their version pin."),
    _gateway("engine_up", _GAUGE, "engine kind", "1 while the engine takes turns."),
    _gateway("engine_weight_version", _GAUGE, "engine kind", "Version that the engine serves."),
    _gateway("weight_version", _GAUGE, "rl_job", "Newest version that was announced."),
    _gateway(
        "version_switch_duration_seconds",
        _HISTOGRAM,
        "kind",
        "One engine's switch, from its last old token to serving again.",
    ),
    _gateway(
        "version_staging_duration_seconds",
        _HISTOGRAM,
        "kind outcome",
        "One engine's preparation of a version while it samples, by outcome.",
    ),
    _gateway(
        "service_misses",
        _GAUGE,
        "service part",
        "Misses of 28 days that harvesting may cause a service (part: budget), that are charged to "
        "it (spent), and that are allotted or lost with a slot's history (outstanding).",
    ),
    _gateway("answers_kept_bytes", _GAUGE, "", "Memory of answers kept."),
    _gateway("leases_held", _GAUGE, "rl_job", "Leases in use."),
    _gateway(
        "lease_slack_seconds",
        _GAUGE,
        "",
        "Least time that is left to use a lease; +Inf without leases. Near 0: not renewed in time.",
    ),
    _gateway(
        "agent_up", _GAUGE, "agent", "1 while the agent's slots may be used; else see the log."
    ),
    _gateway("stop_missing", _GAUGE, "agent", "1 while the agent may not know an order to stop."),
    _gateway(
        "loop_lag_seconds",
        _HISTOGRAM,
        "",
        "Lateness of the event loop, four times a second and more.",
    ),
    _gateway("unrecorded", _GAUGE, "", "1 while a journal or the state file lacks something."),
    _gateway("journal_missing_lines_total", _COUNTER, "", "Decisions that the journals lack."),
    _gateway(*_CERTIFICATES),
)

_PHASES = (
    _phase("jobs", _GAUGE, "stage", "Jobs that are placed, by stage."),
    _phase("permits_waiting", _GAUGE, "phase", "Workers that wait for a permit."),
    _phase("permits_held", _GAUGE, "phase", "Permits in force."),
    _phase("longest_wait_seconds", _GAUGE, "phase", "Longest wait of a worker that waits now."),
    _phase("nodes_held", _GAUGE, "phase", "Nodes covered by a permit."),
    _phase(
        "starts_total",
        _COUNTER,
        "phase start",
        "Permits granted; cold: the first of this phase in its process.",
    ),
    _phase("switches_total", _COUNTER, "phase", "Changes of a node from one job to another."),
    _phase(
        "permits_ended_total",
        _COUNTER,
        "phase reason",
        "Permits ended, by reason; silent: the holder sent no beat for lease_s.",
    ),
    _phase("overruns_total", _COUNTER, "phase", "Phases that took longer than their job declared."),
    _phase(
        "revocations_total",
        _COUNTER,
        "phase",
        "Permits revoked from a phase that overran while others waited.",
    ),
    _phase("tails_moved_total", _COUNTER, "phase", "Tails that left nodes to waiting jobs."),
    _phase("wait_seconds", _HISTOGRAM, "phase", "Time from the request to the permit."),
    _phase("hold_seconds", _HISTOGRAM, "phase", "Time from a permit to its end."),
    _phase("plan_jobs", _GAUGE, "stage", "Submitted jobs, by state."),
    _phase("plan_nodes", _GAUGE, "pool state", "Nodes, by use; missing: failed, not replaced yet."),
    _phase("plan_groups", _GAUGE, "", "Groups of jobs that share nodes."),
    _phase("plan_price_per_hour", _GAUGE, "", "Dollars an hour for the nodes in use."),
    _phase(
        "plan_worst_slowdown_ratio", _GAUGE, "", "Largest slow-down of a placed job, over its SLO."
    ),
    _phase(
        "plan_least_credit_seconds",
        _GAUGE,
        "",
        "Smallest delay that a placed job can still absorb.",
    ),
    _phase("plan_slos", _GAUGE, "state", "Placed jobs: kept, within their SLO, or owed."),
    _phase(
        "plan_slos_ended_total",
        _COUNTER,
        "state",
        "Jobs that ended after an iteration: kept or broken.",
    ),
    _phase("plan_longest_wait_seconds", _GAUGE, "", "Longest wait of a job without nodes."),
    _phase(
        "plan_decision_seconds",
        _HISTOGRAM,
        "",
        "Time of the planner for an event; the control does not reply meanwhile.",
    ),
    _phase("plan_decisions_total", _COUNTER, "decision", "Decisions of the planner, by kind."),
    _phase(*_CERTIFICATES),
)

_WEIGHTS = (
    _weights("transfers_total", _COUNTER, "store outcome", "Files or ranges sent."),
    _weights("sent_bytes_total", _COUNTER, "store", "Bytes of files sent."),
    _weights("composed_deltas_total", _COUNTER, "store outcome", "Skip deltas made."),
    _weights("refused_total", _COUNTER, "reason", "Requests refused."),
    _weights("transfers_active", _GAUGE, "", "Transfers under way."),
    _weights("pulled_bytes_total", _COUNTER, "store", "Bytes that a relay pulled."),
    _weights("dropped_objects_total", _COUNTER, "reason", "Cached files dropped."),
    _weights("cached_bytes", _GAUGE, "", "Bytes that a relay's cache holds."),
    _weights(*_CERTIFICATES),
)

_VLLM = (
    _vllm("num_requests_running", _GAUGE, "Requests in the running batch."),
    _vllm("num_requests_waiting", _GAUGE, "Requests waiting to be scheduled."),
    _vllm("kv_cache_usage_perc", _GAUGE, "KV cache in use, 0 to 1 despite its name."),
    _vllm("prompt_tokens_total", _COUNTER, "Prompt tokens processed."),
    _vllm("generation_tokens_total", _COUNTER, "Tokens generated."),
    _vllm("num_preemptions_total", _COUNTER, "Requests preempted for want of KV blocks."),
    _vllm(
        "request_success_total", _COUNTER, "Requests finished.", "model_name engine finished_reason"
    ),
    _vllm("time_to_first_token_seconds", _HISTOGRAM, "Time to first token."),
    _vllm("inter_token_latency_seconds", _HISTOGRAM, "Time between tokens."),
)

_PROMETHEUS = (
    Metric("up", _GAUGE, (), "1 while the last scrape succeeded.", Exporter.PROMETHEUS),
    Metric(
        "process_cpu_seconds_total",
        _COUNTER,
        (),
        "CPU time of the scraped process (from the client library).",
        Exporter.PROMETHEUS,
    ),
    Metric(
        "process_resident_memory_bytes",
        _GAUGE,
        (),
        "Resident memory of the scraped process (from the client library).",
        Exporter.PROMETHEUS,
    ),
)

METRICS: tuple[Metric, ...] = (*_AGENT, *_GATEWAY, *_PHASES, *_WEIGHTS, *_VLLM, *_PROMETHEUS)
