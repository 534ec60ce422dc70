"""The dashboard row of a planning phase control: placements, missed SLOs, cost."""

from grafana_foundation_sdk.builders.timeseries import Panel as Lines

from deploy.grafana.panels import COUNT, DOLLARS, PER_SECOND, RATIO, SECONDS, lines
from deploy.grafana.queries import latest, quantiles, rate

_PLAN = "scheduler_phase_plan"


def plan() -> tuple[Lines, ...]:
    """Panels on the jobs' SLOs and their cost."""
    return (*_states(), *_shortest(), *_deciding())


def _states() -> tuple[Lines, ...]:
    """Panels on the states of jobs, SLOs and nodes."""
    return (
        lines(
            "Jobs in the plan",
            "Queued: without a placement. Moving: at its iteration's end. Between: no room yet.",
            COUNT,
            (latest(f"{_PLAN}_jobs", by="stage", fold="sum"), "{{stage}}"),
        ),
        lines(
            "SLOs of placed jobs",
            "Placed jobs within their SLO and beyond it; ended: since the control began.",
            COUNT,
            (latest(f"{_PLAN}_slos", by="state", fold="sum"), "{{state}}"),
            (
                latest(f"{_PLAN}_slos_ended_total", by="state", fold="sum"),
                "ended, {{state}}",
            ),
        ),
        lines(
            "Nodes in the plan",
            "Missing: failed, and no free node to replace it.",
            COUNT,
            (latest(f"{_PLAN}_nodes", by="pool, state", fold="sum"), "{{pool}} {{state}}"),
        ),
    )


def _shortest() -> tuple[Lines, ...]:
    """Panels on the jobs worst off: least credit, worst slow-down, longest wait."""
    return (
        lines(
            "Least credit",
            "Smallest delay that a placed job can still absorb; below 0 its SLO is broken.",
            SECONDS,
            (latest(f"{_PLAN}_least_credit_seconds", by="instance", fold="min"), "{{instance}}"),
        ),
        lines(
            "Worst slow-down over its SLO",
            "Above 1 an SLO is broken.",
            RATIO,
            (latest(f"{_PLAN}_worst_slowdown_ratio", by="instance"), "{{instance}}"),
        ),
        lines(
            "Longest wait for a placement",
            "Of submitted jobs that no node could take yet.",
            SECONDS,
            (latest(f"{_PLAN}_longest_wait_seconds", by="instance"), "{{instance}}"),
        ),
    )


def _deciding() -> tuple[Lines, ...]:
    """Panels on the planner's decisions, their cost and duration."""
    return (
        lines(
            "Nodes' cost",
            "Dollars an hour for the nodes in use.",
            DOLLARS,
            (latest(f"{_PLAN}_price_per_hour", by="instance"), "{{instance}}"),
        ),
        lines(
            "Placed, moved, restarted",
            "Per second. Restarted: because a node failed.",
            PER_SECOND,
            (rate(f"{_PLAN}_decisions_total", "decision"), "{{decision}}"),
        ),
        quantiles(
            "Time of a decision",
            "Time of the planner for an event; the control answers no call meanwhile.",
            f"{_PLAN}_decision_seconds",
            "instance",
        ),
    )
