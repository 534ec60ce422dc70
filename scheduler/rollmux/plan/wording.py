"""A plan in sentences, the same in the terminal and on the page."""

from scheduler.rollmux.plan.document import (
    Alternative,
    GroupLoadRow,
    PlanDocument,
    PlannedGroup,
    PlannedJob,
)


def summary(plan: PlanDocument) -> str:
    jobs = sum(len(group.jobs) for group in plan.groups)
    nodes = " and ".join(f"{count} {kind}" for kind, count in plan.nodes.items())
    dearer = plan.dedicated_per_hour / plan.price_per_hour if plan.price_per_hour else 1.0
    left_out = (
        f"; {_counted(len(plan.unplaced), 'job')} found no placement" if plan.unplaced else ""
    )
    return (
        f"{_counted(jobs, 'job')} in {_counted(len(plan.groups), 'group')} on {nodes}: "
        f"{plan.price_per_hour:.2f} $/h. On nodes of their own they would cost "
        f"{plan.dedicated_per_hour:.2f} $/h, {dearer:.2f} times as much{left_out}. "
        f"SLOs count from the {'submission' if plan.slo_counts_queueing else 'placement'} on."
    )


def tightest_slo_text(group: PlannedGroup, plan: PlanDocument) -> str:
    """The SLO with the least room, and its risk."""
    tightest = next(one for one in group.jobs if one.job == group.bound_by).slo_forecast
    return (
        f"Bound by {tightest.job}: {1 - plan.risk:.0%} of forecasts stay below "
        f"{tightest.bound:.2f} of its {tightest.slo:.2f}, so that {tightest.slack:.1%} of its SLO "
        f"is left; forecast risk {tightest.risk:.1%}, accepted {plan.risk:.1%}."
    )


def load_text(load: GroupLoadRow) -> str:
    """Load of the group in words."""
    return (
        f"Load: {load.busiest_s:.0f} s of work on the busiest node in a longest iteration of "
        f"{load.cycle_s:.0f} s, {load.share:.0%}. Phases start first come, first served."
    )


def placement_text(job: PlannedJob) -> str:
    sync = f" | sync {job.sync_s:.0f} s" if job.sync_s else ""
    return f"{job.text}{sync}"


def alternative_text(one: Alternative) -> str:
    """Placement and price of an alternative, and the objection to it."""
    where = f"beside {', '.join(one.beside)}" if one.beside else "alone"
    against = "" if one.admitted else f": refused, {one.reason}"
    return f"{one.kind} {where}, {one.change_per_hour:+.2f} $/h{against}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
