"""The row of harvesting: whether it may go on, what it takes, and how fast it gives that back."""

from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.timeseries import Panel as Lines

from deploy.grafana.panels import COUNT, PER_SECOND, RATIO, SECONDS, lines, number
from deploy.grafana.queries import PLACE, SLOT, latest, quantile, quantiles, rate

_RECLAIM = "harvester_reclaim_duration_seconds"


def harvesting() -> tuple[Lines | Stat, ...]:
    """Panels on whether harvesting may go on, what it takes and what it gives back."""
    return (*_verdicts(), *_left_over(), *_decisions(), *_giving_back(), *_predictions())


def _verdicts() -> tuple[Lines | Stat, ...]:
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


def _left_over() -> tuple[Lines | Stat, ...]:
    """How much does production leave?"""
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
    )


def _decisions() -> tuple[Lines | Stat, ...]:
    """How much of it is granted, and why not more?"""
    return (
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


def _giving_back() -> tuple[Lines | Stat, ...]:
    """How fast does it give back?"""
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
    )


def _predictions() -> tuple[Lines | Stat, ...]:
    """Can its predictions be believed?"""
    return (
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
