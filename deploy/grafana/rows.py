"""The dashboard's queries on production, on RL jobs and on RoseMux's own cost, row by row.

`panels` decides the look of a panel.
"""

from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.timeseries import Panel as Lines

from deploy.grafana.panels import BYTES, COUNT, PER_SECOND, RATIO, lines
from deploy.grafana.queries import PLACE, SLOT, latest, quantiles, rate

_VLLM = 'node=~"$node", job=~"$job", model_name=~"$model_name", instance=~"$instance"'
_ENGINES = "node, job"
_TTFT = "vllm:time_to_first_token_seconds"
_ITL = "vllm:inter_token_latency_seconds"
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
