"""Every metric that the rules and the dashboard rest on: name, type, labels, meaning, exporter.

Data only. Tests hold it against the rules, the dashboard and what the agent and the gateway export.
Labels are those that the exporter sets; `job` and `instance` come from the scraper, so an RL job
is `rl_job` here.
"""

from dataclasses import dataclass
from enum import StrEnum


class MetricType(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Exporter(StrEnum):
    AGENT = "agent"
    GATEWAY = "gateway"
    PHASES = "phases"
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


def _agent(name: str, kind: MetricType, labels: str, text: str) -> Metric:
    return Metric(f"harvester_{name}", kind, tuple(labels.split()), text, Exporter.AGENT)


def _gateway(name: str, kind: MetricType, labels: str, text: str) -> Metric:
    return Metric(f"scheduler_{name}", kind, tuple(labels.split()), text, Exporter.GATEWAY)


def _phase(name: str, kind: MetricType, labels: str, text: str) -> Metric:
    return Metric(f"scheduler_phase_{name}", kind, tuple(labels.split()), text, Exporter.PHASES)


def _vllm(name: str, kind: MetricType, text: str, labels: str = "model_name engine") -> Metric:
    return Metric(f"vllm:{name}", kind, tuple(labels.split()), text, Exporter.VLLM)


_COUNTER, _GAUGE, _HISTOGRAM = MetricType
_AGENT = (
    _agent("build_info", _GAUGE, "version", "Always 1; the version is a label."),
    _agent(
        "mode",
        _GAUGE,
        "slot mode",
        "1 for the mode in force (off, observe, harvest), 0 for others: what the operator wants.",
    ),
    _agent(
        "slot_state",
        _GAUGE,
        "slot state",
        "1 for the state that the slot is in (off, learning, closed, cooldown, open), 0 for "
        "others: what the agent decided.",
    ),
    _agent("quarantined", _GAUGE, "slot", "1 while the slot waits for an operator."),
    _agent(
        "unrecorded",
        _GAUGE,
        "slot",
        "1 while the journal or a state file cannot be written: the slot is withdrawn.",
    ),
    _agent(
        "journal_missing_lines_total",
        _COUNTER,
        "slot",
        "Decisions that could not be written into the journal.",
    ),
    _agent(
        "audit_missing_events_total",
        _COUNTER,
        "",
        "Audit events that could not be written; nothing stops for them.",
    ),
    _agent(
        "slo_headroom_ratio",
        _GAUGE,
        "slot slo",
        "1 - recent latency / SLO (slo: ttft, itl); below 0 is a breach. NaN once it is 300 s old.",
    ),
    _agent(
        "headroom_age_seconds",
        _GAUGE,
        "slot slo",
        "Age of the newest latency behind the headroom; NaN before the first one.",
    ),
    _agent(
        "admission_decisions_total",
        _COUNTER,
        "slot decision reason",
        "Grants written, by whether they are open or closed and why.",
    ),
    _agent(
        "lent_step_tokens",
        _GAUGE,
        "slot",
        "Tokens of a guest step beside idle production; 0 is nothing.",
    ),
    _agent(
        "lent_share_ratio",
        _GAUGE,
        "slot",
        "Share of production's idle time that such steps may take.",
    ),
    _agent("grant_step_tokens", _GAUGE, "slot", "Token cap per guest step; 0 while closed."),
    _agent("guest_tokens_total", _COUNTER, "slot", "Tokens that the guest's steps processed."),
    _agent(
        "idle_ratio",
        _GAUGE,
        "slot",
        "Share of recent time without a production step; NaN is unknown.",
    ),
    _agent(
        "idle_forecast_ratio",
        _GAUGE,
        "slot horizon percentile",
        "Share of the next seconds (horizon: 10, 30, 120) expected without a production step, by "
        "percentile (10, 50, 90); NaN is unknown.",
    ),
    _agent(
        "guest_step_over_ratio",
        _GAUGE,
        "slot",
        "Share of the guest's late steps that took longer than predicted; 0.1 is expected.",
    ),
    _agent(
        "guest_step_percentile_ratio",
        _GAUGE,
        "slot kind percentile",
        "The guest's late steps over what was predicted for them alone, while production was idle "
        "(alone; 1 is expected at 0.9) and where it overlapped them (beside).",
    ),
    _agent(
        "production_step_over_ratio",
        _GAUGE,
        "slot kind",
        "Share of production's late prefills or decodes that took longer than predicted; 0.1 is "
        "expected.",
    ),
    _agent(
        "production_step_percentile_ratio",
        _GAUGE,
        "slot kind percentile",
        "Production's late prefills or decodes over what was predicted; 1 is expected at 0.9.",
    ),
    _agent(
        "blocking_ratio",
        _GAUGE,
        "slot kind",
        "Share of a running guest step that delays production: configured, in_force (1 under MPS "
        "while both are not seen on one server), and observed (P99 of the tokens beside a stepping "
        "guest, in steps of 0.05).",
    ),
    _agent(
        "guest_isolation",
        _GAUGE,
        "slot backend",
        "1 for what the guest says that bounds its steps: idle, time-slicing, mps, none.",
    ),
    _agent(
        "guest_isolation_holds",
        _GAUGE,
        "slot",
        "0 where the guest's threads do not rank below production's; NaN without a promise.",
    ),
    _agent(
        "mps_state",
        _GAUGE,
        "slot state",
        "1 for what the MPS daemon says: guest and production together on one server, apart, a "
        "fault of a server, or silent. All 0 without consent.",
    ),
    _agent(
        "shared_memory_bytes",
        _GAUGE,
        "slot part",
        "Of the control group, or of the KV by pages, that guest and production share: used, "
        "limit, guest and guest_limit (KV alone); NaN is unknown or not shared.",
    ),
    _agent(
        "guest_weights_away", _GAUGE, "slot", "1 while the guest's weights sleep in host memory."
    ),
    _agent(
        "guest_asleep_bytes_max",
        _GAUGE,
        "slot",
        "Of the accelerator that the guest may hold while its weights sleep: graphs, activations "
        "and context, as counted awake. NaN where weights never sleep, or where that is not known.",
    ),
    _agent(
        "guest_memory_bytes",
        _GAUGE,
        "slot part",
        "Accelerator memory reported by the guest at its start, by part: weights, graphs, "
        "activations, context, kv. All but kv stay while it is closed.",
    ),
    _agent(
        "guest_kv_tokens",
        _GAUGE,
        "slot state",
        "The guest's KV: held by requests, retained for trajectories that are away at their tools, "
        "free, or withheld (returned to production).",
    ),
    _agent(
        "guest_prefix_tokens_total",
        _COUNTER,
        "slot outcome",
        "Prefix tokens kept for a trajectory away at its tools: used by it, or dropped before.",
    ),
    _agent(
        "kv_reclaims_total",
        _COUNTER,
        "slot outcome",
        "Memory that was due: returned in time, or missed (not by its deadline).",
    ),
    _agent(
        "guest_actions_total",
        _COUNTER,
        "slot action outcome",
        "What the agent does to a guest's processes (lift, settle, kill): asked by the policy, "
        "done, or failed.",
    ),
    _agent("leases_active", _GAUGE, "slot tenant", "Leases in force."),
    _agent(
        "lease_info",
        _GAUGE,
        "slot tenant rl_job",
        "1 with tenant and job of the lease in force (other, where the tenant is not configured), "
        "0 with empty labels without a lease.",
    ),
    _agent("leases_ended_total", _COUNTER, "slot reason", "Leases ended, by reason."),
    _agent("evictions_total", _COUNTER, "slot reason", "Guest requests aborted for production."),
    _agent(
        "reclaim_duration_seconds",
        _HISTOGRAM,
        "slot",
        "From the decision to close until the guest's last launched step ended.",
    ),
    _agent(
        "guest_steps_met",
        _HISTOGRAM,
        "slot",
        "The guest's steps that were under way between a production request's arrival and its "
        "first token; at most 1 at the P99.",
    ),
    _agent(
        "signal_age_seconds",
        _GAUGE,
        "slot source",
        "Age of the newest whole reading of a pulse or of the guest's page; infinite: never seen.",
    ),
    _agent(
        "kill_switch_engaged", _GAUGE, "level", "1 while hold or drain is set at that level (node)."
    ),
    _agent(
        "slot_stopped",
        _GAUGE,
        "slot order",
        "1 for the order to stop that binds the slot (hold, drain), whatever its source.",
    ),
    _agent(
        "interlock_known",
        _GAUGE,
        "interlock",
        "0 while the source of an interlock (alerts, accelerators) gives no usable answer: slots "
        "are held.",
    ),
    _agent(
        "stop_info",
        _GAUGE,
        "slot tenant order source by reason at",
        "1 for each order to stop in force, with its author, reason and time.",
    ),
    _agent("requests_total", _COUNTER, "slot", "Production requests counted by the error budget."),
    _agent(
        "slo_misses_total",
        _COUNTER,
        "slot",
        "Production requests over their SLO whose time overlapped a guest step.",
    ),
    _agent(
        "unanswered_requests_total",
        _COUNTER,
        "slot",
        "Production requests that ended without a first token before their SLO: no evidence.",
    ),
    _agent("slo_objective_ratio", _GAUGE, "slot", "Share of requests that must meet the SLO."),
    _agent(
        "error_budget_spent_ratio",
        _GAUGE,
        "slot",
        "Harvesting's misses in 28 days / the slot's allowance, or its allotment under a lease.",
    ),
    _agent(
        "guard_value",
        _GAUGE,
        "slot guard",
        "What a guard measures: share of the last minute in which the guest had work and the law "
        "alone held its steps (slack_law), share of misses beyond production's own (level_ttft, "
        "level_itl), misses charged (error_budget), burn rate (burn_1h, burn_6h), evidence of harm "
        "(proof).",
    ),
    _agent(
        "guard_limit",
        _GAUGE,
        "slot guard",
        "The value above which the guard reduces or stops harvesting.",
    ),
    _agent("guard_binds", _GAUGE, "slot guard", "1 while it reduces or stops harvesting."),
    _agent(
        "impact_ratio",
        _GAUGE,
        "slot slo bound",
        "Latency with grants over without, minus 1 (bound: low, mean, high); NaN is unknown.",
    ),
    _agent("impact_limit_ratio", _GAUGE, "slot", "Impact at which harvesting stops itself."),
    _agent(
        "config_last_reload_successful",
        _GAUGE,
        "",
        "0 after a reload that was refused, or that a restart must complete.",
    ),
    _agent(
        "config_restart_needed",
        _GAUGE,
        "",
        "Fields of the configuration file that are in force only after a restart.",
    ),
    _agent(
        "unsafe_experiments",
        _GAUGE,
        "",
        "1 where settings may go beyond the ranges that protect production.",
    ),
)

_GATEWAY = (
    _gateway("build_info", _GAUGE, "version", "Always 1; the version is a label."),
    _gateway("turns_held", _GAUGE, "rl_job", "Turns whose pin no engine meets yet."),
    _gateway("turns_queued", _GAUGE, "rl_job", "Turns waiting for an engine."),
    _gateway("turns_running", _GAUGE, "engine kind", "Turns on an engine (dedicated, guest)."),
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
        "service_misses",
        _GAUGE,
        "service part",
        "Misses of 28 days that harvesting may cause a service (part: budget), that are charged to "
        "it (spent), and that are allotted or lost with a slot's history (outstanding).",
    ),
    _gateway("answers_kept_bytes", _GAUGE, "", "Memory of answers kept."),
    _gateway("leases_held", _GAUGE, "rl_job", "Leases in use."),
    _gateway("unrecorded", _GAUGE, "", "1 while a journal or the state file lacks something."),
    _gateway("journal_missing_lines_total", _COUNTER, "", "Decisions that the journals lack."),
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
        "Permits ended, by reason; silent is a lost lease.",
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
    _phase("plan_promises", _GAUGE, "state", "Placed jobs: kept, within their SLO, or owed."),
    _phase(
        "plan_promises_ended_total",
        _COUNTER,
        "promise",
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

METRICS: tuple[Metric, ...] = (*_AGENT, *_GATEWAY, *_PHASES, *_VLLM, *_PROMETHEUS)
