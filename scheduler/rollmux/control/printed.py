"""Status of jobs in a terminal of 80 columns: their permits and, under a planning control, their
groups. Names of jobs and nodes are wrapped; headings and numbers are not."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scheduler.rollmux.control.wire import JobStatus, PlanStatus


def printed(jobs: Sequence[JobStatus]) -> RenderableType:
    planned = [(job, job.plan) for job in jobs if job.plan is not None]
    if not planned:
        return _permits(jobs)
    reasons = [Text(f"{job.job}: {_words(plan)}") for job, plan in planned]
    return Group(_permits(jobs), Text(), _plan(planned), *reasons)


def _permits(jobs: Sequence[JobStatus]) -> Table:
    table = _table("job", "phase", "stage", "holds", "waits for", numbers=("complete", "failures"))
    for job in jobs:
        table.add_row(
            job.job,
            "" if job.kind is None else job.kind,
            f"{job.stage}, warned" if job.warned else job.stage,
            _held(job),
            " ".join(job.awaits),
            f"{job.complete_ratio:.0%}" if job.nodes else "",
            str(job.failures or ""),
        )
    return table


def _held(job: JobStatus) -> str:
    """Nodes of the permit, then nodes with the job's state alone, which may be asked for."""
    words = [" ".join(job.nodes)] if job.nodes else []
    if job.loaded:
        asked = ", asked to leave" if job.unload else ""
        words.append(f"(loaded: {' '.join(job.loaded)}{asked})")
    return " ".join(words)


def _plan(planned: Sequence[tuple[JobStatus, PlanStatus]]) -> Table:
    numbers = ("slow-down", "SLO", "credit s", "iterations", "moves")
    table = _table("group", "job", "rollout | training", numbers=numbers)
    for job, plan in sorted(planned, key=lambda one: (one[1].group, one[0].job)):
        table.add_row(
            plan.group or plan.stage,
            job.job,
            plan.text if plan.nodes else "",
            "-" if plan.slowdown is None else f"{plan.slowdown:.2f}",
            f"{plan.slo:.2f}",
            "-" if plan.credit_s is None else f"{plan.credit_s:.0f}",
            str(plan.iterations),
            str(plan.moves),
        )
    return table


def _words(plan: PlanStatus) -> str:
    if plan.moves_to:
        return f"{plan.stage}, goes to {' '.join(plan.moves_to)}: {plan.reason}"
    return f"{plan.stage}: {plan.reason}"


def _table(*names: str, numbers: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold", min_width=len(name.split()[0]))
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
