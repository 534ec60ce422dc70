"""The dashboard's queries, row by row. `panels` decides the look of a panel."""

from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.timeseries import Panel as Lines

from deploy.grafana.panels import BYTES, COUNT, PER_SECOND, RATIO, SECONDS, lines, number
from deploy.grafana.queries import PLACE, SLOT, latest, quantile, quantiles, rate

_VLLM = 'node=~"$node", job=~"$job", model_name=~"$model_name", instance=~"$instance"'
_ENGINES = "node, job"
_TTFT = "vllm:time_to_first_token_seconds"
_ITL = "vllm:inter_token_latency_seconds"
_RECLAIM = "harvester_reclaim_duration_seconds"
_PHASE_WAIT = "scheduler_phase_wait_seconds"
_SWITCH = "scheduler_version_switch_duration_seconds"


def _attainment(histogram: str, edge: str) -> str:
    within = rate(f"{histogram}_bucket", _ENGINES, f'{_VLLM}, le="{edge}"')
    return f"{within} / {rate(f'{histogram}_count', _ENGINES, _VLLM)}"


def production() -> tuple[Lines | Stat, ...]:
    """Does production feel it?"""
    engine = f"{_ENGINES}, instance"
    return (
        quantiles("Time to first token", "From arrival at the engine.", _TTFT, _ENGINES, _VLLM),
        quantiles("Inter-token latency", "Between tokens.", _ITL, _ENGINES, _VLLM),
        lines(
            "Impact of harvesting",
            "Latency with grants over latency in randomised slices without, minus 1. It stops "
            "nothing: the proof does, by its own tests.",
            RATIO,
            (
                latest("harvester_impact_ratio", SLOT, f"{PLACE}, slo, bound"),
                "{{node}} {{slot}} {{slo}} {{bound}}",
            ),
            (latest("harvester_impact_limit_ratio", SLOT), "{{node}} {{slot}} limit"),
        ),
        lines(
            "SLO attainment",
            "Share of requests (TTFT) and tokens (ITL) within the chosen bucket edges.",
            RATIO,
            (_attainment(_TTFT, "$ttft_slo"), "{{node}} {{job}} TTFT"),
            (_attainment(_ITL, "$itl_slo"), "{{node}} {{job}} ITL"),
        ),
        lines(
            "Requests in the engines",
            "Running batch and queue.",
            COUNT,
            (
                latest("vllm:num_requests_running", _VLLM, engine, "sum"),
                "{{node}} {{instance}} running",
            ),
            (
                latest("vllm:num_requests_waiting", _VLLM, engine, "sum"),
                "{{node}} {{instance}} waiting",
            ),
        ),
        lines(
            "KV cache in use",
            "Production preempts its own requests when it runs full.",
            RATIO,
            (latest("vllm:kv_cache_usage_perc", _VLLM, engine), "{{node}} {{job}} {{instance}}"),
        ),
    )


def verdicts() -> tuple[Lines | Stat, ...]:
    """May harvesting go on?"""
    return (
        number(
            "Error budget spent",
            "Harvesting's misses in 28 days over its share of the budget; it stops at 100 %.",
            RATIO,
            (latest("harvester_error_budget_spent_ratio", SLOT), "{{node}} {{slot}}"),
            bad_above=1.0,
        ),
        number(
            "Burn rate, 1 h",
            "Times too fast, by all misses beside guest steps: a page goes out at 14.4. Less "
            "production's own (guard), harvesting stops at 7.2.",
            COUNT,
            (latest("slot:harvester_slo_burn:ratio_rate1h", SLOT), "{{node}} {{slot}}"),
            (
                latest("harvester_guard_value", f'{SLOT}, guard="burn_1h"'),
                "{{node}} {{slot}} guard",
            ),
            bad_above=7.2,
        ),
        number(
            "Oldest signal",
            "Age of the oldest pulse or guest page; a stale one closes the slot.",
            SECONDS,
            (latest("harvester_signal_age_seconds", SLOT), "{{node}} {{slot}}"),
            bad_above=0.5,
        ),
        number(
            "Stopped by an operator",
            "1 while the node's kill file, or any order to hold or drain the slot, is in force.",
            COUNT,
            (
                latest("harvester_slot_stopped", SLOT, f"{PLACE}, order"),
                "{{node}} {{slot}} {{order}}",
            ),
            (
                latest("harvester_kill_switch_engaged", 'node=~"$node"', "node, level"),
                "{{node}} {{level}}",
            ),
            bad_above=1.0,
        ),
        number(
            "Leases active",
            "By tenant.",
            COUNT,
            (
                latest("harvester_leases_active", SLOT, f"{PLACE}, tenant", "sum"),
                "{{node}} {{slot}} {{tenant}}",
            ),
        ),
        number(
            "Idle share",
            "Share of recent time in which production had nothing to step.",
            RATIO,
            (latest("harvester_idle_ratio", SLOT), "{{node}} {{slot}}"),
        ),
    )


def harvesting() -> tuple[Lines | Stat, ...]:
    """Panels on the harvested capacity and the reasons of decisions."""
    return (
        lines(
            "SLO headroom",
            "1 - recent latency / SLO; below 0 is a breach.",
            RATIO,
            (
                latest("harvester_slo_headroom_ratio", SLOT, f"{PLACE}, slo", "min"),
                "{{node}} {{slot}} {{slo}}",
            ),
        ),
        lines(
            "Idle share of the next 30 s",
            "Share expected without a production step: median, and the band of 80 %.",
            RATIO,
            (
                latest(
                    "harvester_idle_forecast_ratio",
                    f'{SLOT}, horizon="30"',
                    f"{PLACE}, percentile",
                    "min",
                ),
                "{{node}} {{slot}} P{{percentile}}",
            ),
        ),
        lines(
            "Slot state",
            "1 for the state that each slot is in.",
            COUNT,
            (
                latest("harvester_slot_state", SLOT, f"{PLACE}, state"),
                "{{node}} {{slot}} {{state}}",
            ),
        ),
        lines(
            "Mode",
            "1 for the mode that is in force on each slot.",
            COUNT,
            (latest("harvester_mode", SLOT, f"{PLACE}, mode"), "{{node}} {{slot}} {{mode}}"),
        ),
        lines(
            "Grant",
            "Token cap per guest step, 0 while closed.",
            COUNT,
            (latest("harvester_grant_step_tokens", SLOT), "{{node}} {{slot}}"),
        ),
        lines(
            "Decisions",
            "Grants written per second, by reason.",
            PER_SECOND,
            (
                rate("harvester_admission_decisions_total", f"{PLACE}, decision, reason", SLOT),
                "{{node}} {{slot}} {{decision}} {{reason}}",
            ),
        ),
        lines(
            "Evictions and ended leases",
            "Per second.",
            PER_SECOND,
            (
                rate("harvester_evictions_total", f"{PLACE}, reason", SLOT),
                "{{node}} {{slot}} evicted: {{reason}}",
            ),
            (
                rate("harvester_leases_ended_total", f"{PLACE}, reason", SLOT),
                "{{node}} {{slot}} lease ended: {{reason}}",
            ),
        ),
    )


def giving_back() -> tuple[Lines | Stat, ...]:
    """How fast does it give back, and can its predictions be believed?"""
    return (
        quantiles(
            "Time to give back",
            "From the decision to close until the guest's last launched step ended.",
            _RECLAIM,
            PLACE,
            SLOT,
        ),
        lines(
            "Guest steps that a request meets",
            "Between a production request's arrival and its first token; at most 1 at the P99.",
            COUNT,
            (quantile(0.99, "harvester_guest_steps_met", PLACE, SLOT), "{{node}} {{slot}} p99"),
        ),
        lines(
            "Guest KV",
            "Tokens held by requests, retained for trajectories away at their tools, free, and "
            "withheld: given back to production.",
            COUNT,
            (
                latest("harvester_guest_kv_tokens", SLOT, f"{PLACE}, state"),
                "{{node}} {{slot}} {{state}}",
            ),
        ),
        lines(
            "Memory that was due",
            "Returned in time, or missed. Per second.",
            PER_SECOND,
            (
                rate("harvester_kv_reclaims_total", f"{PLACE}, outcome", SLOT),
                "{{node}} {{slot}} {{outcome}}",
            ),
        ),
        lines(
            "What was done to the guest",
            "Lifts, settles and kills: requested, done, or failed. Per second.",
            PER_SECOND,
            (
                rate("harvester_guest_actions_total", f"{PLACE}, action, outcome", SLOT),
                "{{node}} {{slot}} {{action}} {{outcome}}",
            ),
        ),
        lines(
            "Retained prefixes",
            "Tokens kept for a trajectory away at its tools: used by it, or dropped. Per second.",
            PER_SECOND,
            (
                rate("harvester_guest_prefix_tokens_total", f"{PLACE}, outcome", SLOT),
                "{{node}} {{slot}} {{outcome}}",
            ),
        ),
        lines(
            "Guest steps longer than predicted",
            "A tenth is what the step-time model promises.",
            RATIO,
            (latest("harvester_guest_step_over_ratio", SLOT), "{{node}} {{slot}}"),
        ),
        lines(
            "Guest steps over what was predicted",
            "Observed over predicted for the guest alone. Alone 1 at the P90 is what the step-time "
            "model promises; beside production 2 is half of the accelerator.",
            RATIO,
            (
                latest("harvester_guest_step_percentile_ratio", SLOT, f"{PLACE}, kind, percentile"),
                "{{node}} {{slot}} {{kind}} p{{percentile}}",
            ),
        ),
        lines(
            "Production's steps over what was predicted",
            "Observed over predicted; 1 at the P90 is what the step-time model promises.",
            RATIO,
            (
                latest(
                    "harvester_production_step_percentile_ratio", SLOT, f"{PLACE}, kind, percentile"
                ),
                "{{node}} {{slot}} {{kind}} p{{percentile}}",
            ),
        ),
    )


def rollouts() -> tuple[Lines | Stat, ...]:
    """Panels on the service that RL jobs get."""
    wrong = 'outcome=~"lost|duplicated"'
    return (
        lines(
            "Rollout tokens per second",
            "By kind of engine: what dedicated engines make and what harvesting adds.",
            PER_SECOND,
            (rate("scheduler_generated_tokens_total", "rl_job, kind"), "{{rl_job}} {{kind}}"),
            (rate("harvester_guest_tokens_total", PLACE, SLOT), "{{node}} {{slot}} guest steps"),
        ),
        lines(
            "Turns",
            "Waiting at the gateway and running on each engine.",
            COUNT,
            (latest("scheduler_turns_queued", by="rl_job", fold="sum"), "{{rl_job}} queued"),
            (latest("scheduler_turns_running", by="engine, kind"), "{{engine}} ({{kind}})"),
        ),
        lines(
            "Turns ended",
            "Per second, by outcome.",
            PER_SECOND,
            (rate("scheduler_turns_total", "rl_job, outcome"), "{{rl_job}} {{outcome}}"),
        ),
        lines(
            "Trajectories lost or duplicated, stale tokens",
            "Zeros by design: one count is a defect.",
            COUNT,
            (
                latest("scheduler_trajectories_total", wrong, "rl_job, outcome", "sum"),
                "{{rl_job}} {{outcome}}",
            ),
            (latest("scheduler_stale_tokens_total", by="rl_job", fold="sum"), "{{rl_job}} stale"),
        ),
        lines(
            "Error budgets of services",
            "Misses of 28 days: at spent above budget no slot of the service is leased.",
            COUNT,
            (
                latest("scheduler_service_misses", by="service, part", fold="sum"),
                "{{service}} {{part}}",
            ),
        ),
        lines(
            "Weight versions",
            "What each engine serves beside the newest announced.",
            COUNT,
            (latest("scheduler_weight_version", by="rl_job"), "{{rl_job}} announced"),
            (latest("scheduler_engine_weight_version", by="engine"), "{{engine}}"),
        ),
        quantiles(
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
                latest("scheduler_phase_permits_waiting", by="phase", fold="sum"),
                "{{phase}} waiting",
            ),
            (latest("scheduler_phase_permits_held", by="phase", fold="sum"), "{{phase}} held"),
        ),
        quantiles(
            "Wait for a permit", "Time from the request to the permit.", _PHASE_WAIT, "phase"
        ),
        lines(
            "Phase starts and switches",
            "Per second: warm and cold starts, and nodes that went from one job to another.",
            PER_SECOND,
            (rate("scheduler_phase_starts_total", "phase, start"), "{{phase}} {{start}}"),
            (rate("scheduler_phase_switches_total", "phase"), "{{phase}} switches"),
        ),
        lines(
            "Phases in trouble",
            "Per second: longer than declared, revoked, and permits that ended badly.",
            PER_SECOND,
            (rate("scheduler_phase_overruns_total", "phase"), "{{phase}} overran"),
            (rate("scheduler_phase_revocations_total", "phase"), "{{phase}} revoked"),
            (
                rate("scheduler_phase_permits_ended_total", "phase, reason", ended),
                "{{phase}} {{reason}}",
            ),
        ),
    )


def own_cost() -> tuple[Lines | Stat, ...]:
    """Panels on RoseMux's own cost."""
    ours = 'job=~"rosemux-.+"'
    process = "{{job}} {{instance}}"
    return (
        lines(
            "CPU",
            "Cores in use.",
            COUNT,
            (rate("process_cpu_seconds_total", "job, instance", ours), process),
            width=12,
        ),
        lines(
            "Memory",
            "Resident.",
            BYTES,
            (latest("process_resident_memory_bytes", ours, "job, instance"), process),
            width=12,
        ),
    )
