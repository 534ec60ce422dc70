"""What the dashboard asks, row by row. How a panel looks is in `panels`."""

from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.timeseries import Panel as Lines

from deploy.grafana.panels import BYTES, COUNT, PER_SECOND, RATIO, SECONDS, lines, number

_VLLM = 'job=~"$job", model_name=~"$model_name", instance=~"$instance"'
_SLOT = 'slot=~"$slot"'
_TTFT = "vllm:time_to_first_token_seconds"
_ITL = "vllm:inter_token_latency_seconds"
_RECLAIM = "harvester_reclaim_duration_seconds"
_PHASE_WAIT = "scheduler_phase_wait_seconds"
_SWITCH = "scheduler_version_switch_duration_seconds"


def _latest(gauge: str, matchers: str = "", by: str = "slot", fold: str = "max") -> str:
    return f"{fold} by ({by}) ({gauge}{{{matchers}}})"


def _rate(counter: str, by: str, matchers: str = "") -> str:
    return f"sum by ({by}) (rate({counter}{{{matchers}}}[$__rate_interval]))"


def _quantile(quantile: float, histogram: str, by: str, matchers: str = "") -> str:
    return f"histogram_quantile({quantile}, {_rate(f'{histogram}_bucket', f'le, {by}', matchers)})"


def _attainment(histogram: str, edge: str) -> str:
    within = _rate(f"{histogram}_bucket", "job", f'{_VLLM}, le="{edge}"')
    return f"{within} / {_rate(f'{histogram}_count', 'job', _VLLM)}"


def _quantiles(title: str, about: str, histogram: str, by: str, matchers: str = "") -> Lines:
    return lines(
        title,
        f"{about} A quantile is interpolated inside its histogram bucket.",
        SECONDS,
        (_quantile(0.5, histogram, by, matchers), f"{{{{{by}}}}} p50"),
        (_quantile(0.99, histogram, by, matchers), f"{{{{{by}}}}} p99"),
    )


def production() -> tuple[Lines | Stat, ...]:
    """Does production feel it?"""
    engine = "job, instance"
    return (
        _quantiles("Time to first token", "From arrival at the engine.", _TTFT, "job", _VLLM),
        _quantiles("Inter-token latency", "Between tokens.", _ITL, "job", _VLLM),
        lines(
            "Impact of harvesting",
            "Latency with grants over latency in randomised slices without, minus 1. Harvesting "
            "stops itself when the lower bound exceeds the limit.",
            RATIO,
            (_latest("harvester_impact_ratio", _SLOT, "slot, slo, bound"), "{{slo}} {{bound}}"),
            (_latest("harvester_impact_limit_ratio", _SLOT), "limit"),
        ),
        lines(
            "SLO attainment",
            "Share of requests (TTFT) and tokens (ITL) within the chosen bucket edges.",
            RATIO,
            (_attainment(_TTFT, "$ttft_slo"), "{{job}} TTFT"),
            (_attainment(_ITL, "$itl_slo"), "{{job}} ITL"),
        ),
        lines(
            "Requests in the engines",
            "Running batch and queue.",
            COUNT,
            (_latest("vllm:num_requests_running", _VLLM, engine, "sum"), "{{instance}} running"),
            (_latest("vllm:num_requests_waiting", _VLLM, engine, "sum"), "{{instance}} waiting"),
        ),
        lines(
            "KV cache in use",
            "Production preempts its own requests when it runs full.",
            RATIO,
            (_latest("vllm:kv_cache_usage_perc", _VLLM, engine), "{{job}} {{instance}}"),
        ),
    )


def verdicts() -> tuple[Lines | Stat, ...]:
    """May harvesting go on?"""
    return (
        number(
            "Error budget spent",
            "Harvesting's misses in 28 days over its share of the budget; it stops at 100 %.",
            RATIO,
            (_latest("harvester_error_budget_spent_ratio", _SLOT), "{{slot}}"),
            bad_above=1.0,
        ),
        number(
            "Burn rate, 1 h",
            "Times too fast. Harvesting stops at 7.2, a page goes out at 14.4.",
            COUNT,
            (_latest("slot:harvester_slo_burn:ratio_rate1h", _SLOT), "{{slot}}"),
            bad_above=7.2,
        ),
        number(
            "Oldest signal",
            "Age of the oldest pulse or guest page; a stale one closes the slot.",
            SECONDS,
            (_latest("harvester_signal_age_seconds", _SLOT), "{{slot}}"),
            bad_above=0.5,
        ),
        number(
            "Kill switch",
            "1 while an operator holds or drains.",
            COUNT,
            (_latest("harvester_kill_switch_engaged", by="level"), "{{level}}"),
            bad_above=1.0,
        ),
        number(
            "Leases active",
            "By tenant.",
            COUNT,
            (_latest("harvester_leases_active", _SLOT, "tenant", "sum"), "{{tenant}}"),
        ),
        number(
            "Idle share",
            "Share of recent time in which production had nothing to step.",
            RATIO,
            (_latest("harvester_idle_ratio", _SLOT), "{{slot}}"),
        ),
    )


def harvesting() -> tuple[Lines | Stat, ...]:
    """What does it take, and why?"""
    return (
        lines(
            "SLO headroom",
            "1 - recent latency / SLO; below 0 is a breach.",
            RATIO,
            (
                _latest("harvester_slo_headroom_ratio", _SLOT, "slot, slo", "min"),
                "{{slot}} {{slo}}",
            ),
        ),
        lines(
            "Slot state",
            "1 for the state that each slot is in.",
            COUNT,
            (_latest("harvester_mode", _SLOT, "slot, mode"), "{{slot}} {{mode}}"),
        ),
        lines(
            "Grant",
            "Token cap per guest step, 0 while closed.",
            COUNT,
            (_latest("harvester_grant_step_tokens", _SLOT), "{{slot}}"),
        ),
        lines(
            "Decisions",
            "Grants written per second, by reason.",
            PER_SECOND,
            (
                _rate("harvester_admission_decisions_total", "decision, reason", _SLOT),
                "{{decision}} {{reason}}",
            ),
        ),
        lines(
            "Evictions and ended leases",
            "Per second.",
            PER_SECOND,
            (_rate("harvester_evictions_total", "reason", _SLOT), "evicted: {{reason}}"),
            (_rate("harvester_leases_ended_total", "reason", _SLOT), "lease ended: {{reason}}"),
        ),
    )


def giving_back() -> tuple[Lines | Stat, ...]:
    """How fast does it give back, and can its predictions be believed?"""
    return (
        _quantiles(
            "Time to give back",
            "From the decision to close until the guest's last launched step ended.",
            _RECLAIM,
            "slot",
            _SLOT,
        ),
        lines(
            "Guest KV",
            "Tokens held by requests, retained for trajectories away at their tools, free, and "
            "withheld: given back to production.",
            COUNT,
            (_latest("harvester_guest_kv_tokens", _SLOT, "slot, state"), "{{slot}} {{state}}"),
        ),
        lines(
            "Memory that was due",
            "Returned in time, or missed: the guest was ended. Per second.",
            PER_SECOND,
            (_rate("harvester_kv_reclaims_total", "slot, outcome", _SLOT), "{{slot}} {{outcome}}"),
        ),
        lines(
            "Retained prefixes",
            "Tokens kept for a trajectory away at its tools: used by it, or dropped. Per second.",
            PER_SECOND,
            (
                _rate("harvester_guest_prefix_tokens_total", "slot, outcome", _SLOT),
                "{{slot}} {{outcome}}",
            ),
        ),
        lines(
            "Guest steps longer than predicted",
            "A tenth is what the step-time model promises.",
            RATIO,
            (_latest("harvester_guest_step_over_ratio", _SLOT), "{{slot}}"),
        ),
        lines(
            "Production's steps over what was predicted",
            "Observed over predicted; 1 at the P90 is what the step-time model promises.",
            RATIO,
            (
                _latest(
                    "harvester_production_step_percentile_ratio", _SLOT, "slot, kind, percentile"
                ),
                "{{slot}} {{kind}} p{{percentile}}",
            ),
        ),
    )


def rollouts() -> tuple[Lines | Stat, ...]:
    """What do the RL jobs get?"""
    wrong = 'outcome=~"lost|duplicated"'
    return (
        lines(
            "Rollout tokens per second",
            "By kind of engine: what dedicated engines make and what harvesting adds.",
            PER_SECOND,
            (_rate("scheduler_generated_tokens_total", "rl_job, kind"), "{{rl_job}} {{kind}}"),
            (_rate("harvester_guest_tokens_total", "slot", _SLOT), "{{slot}} guest steps"),
        ),
        lines(
            "Turns",
            "Waiting at the gateway and running on each engine.",
            COUNT,
            (_latest("scheduler_turns_queued", by="rl_job", fold="sum"), "{{rl_job}} queued"),
            (_latest("scheduler_turns_running", by="engine, kind"), "{{engine}} ({{kind}})"),
        ),
        lines(
            "Turns ended",
            "Per second, by outcome.",
            PER_SECOND,
            (_rate("scheduler_turns_total", "rl_job, outcome"), "{{rl_job}} {{outcome}}"),
        ),
        lines(
            "Trajectories lost or duplicated, stale tokens",
            "Zeros by design: one count is a defect.",
            COUNT,
            (
                _latest("scheduler_trajectories_total", wrong, "rl_job, outcome", "sum"),
                "{{rl_job}} {{outcome}}",
            ),
            (_latest("scheduler_stale_tokens_total", by="rl_job", fold="sum"), "{{rl_job}} stale"),
        ),
        lines(
            "Weight versions",
            "What each engine serves beside the newest announced.",
            COUNT,
            (_latest("scheduler_weight_version", by="rl_job"), "{{rl_job}} announced"),
            (_latest("scheduler_engine_weight_version", by="engine"), "{{engine}}"),
        ),
        _quantiles(
            "Version switch",
            "One engine, from its last token of the old version to serving again.",
            _SWITCH,
            "kind",
        ),
    )


def phases() -> tuple[Lines | Stat, ...]:
    """Do jobs that share nodes take turns?"""
    ended = 'reason!~"done|left|withdrawn"'
    return (
        lines(
            "Phase permits",
            "Workers that wait for their turn, and permits in force.",
            COUNT,
            (
                _latest("scheduler_phase_permits_waiting", by="phase", fold="sum"),
                "{{phase}} waiting",
            ),
            (_latest("scheduler_phase_permits_held", by="phase", fold="sum"), "{{phase}} held"),
        ),
        _quantiles(
            "Wait for a permit", "From a place in the line to the permit.", _PHASE_WAIT, "phase"
        ),
        lines(
            "Phase starts and switches",
            "Per second: warm and cold starts, and nodes that went from one job to another.",
            PER_SECOND,
            (_rate("scheduler_phase_starts_total", "phase, start"), "{{phase}} {{start}}"),
            (_rate("scheduler_phase_switches_total", "phase"), "{{phase}} switches"),
        ),
        lines(
            "Phases in trouble",
            "Per second: longer than declared, revoked, and permits that ended badly.",
            PER_SECOND,
            (_rate("scheduler_phase_overruns_total", "phase"), "{{phase}} overran"),
            (_rate("scheduler_phase_revocations_total", "phase"), "{{phase}} revoked"),
            (
                _rate("scheduler_phase_permits_ended_total", "phase, reason", ended),
                "{{phase}} {{reason}}",
            ),
        ),
    )


def own_cost() -> tuple[Lines | Stat, ...]:
    """What does RoseMux itself cost?"""
    ours = 'job=~"rosemux-.+"'
    process = "{{job}} {{instance}}"
    return (
        lines(
            "CPU",
            "Cores in use.",
            COUNT,
            (_rate("process_cpu_seconds_total", "job, instance", ours), process),
            width=12,
        ),
        lines(
            "Memory",
            "Resident.",
            BYTES,
            (_latest("process_resident_memory_bytes", ours, "job, instance"), process),
            width=12,
        ),
    )
