"""A plan in the terminal: a table, reasons and a picture a group."""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scheduler.pictures.gantt import gantt_text, letter
from scheduler.rollmux.plan import wording
from scheduler.rollmux.plan.document import Alternative, PlanDocument, PlannedGroup, PlannedJob

_COLOURS: Final = ("blue", "dark_orange", "green", "magenta", "yellow", "red", "cyan", "purple")
_SHOWN: Final = 2
"""Alternatives of each job that are refused, and that are not; the others are in the file."""
_COLUMNS_MAX: Final = 110


def printed(plan: PlanDocument, *, width: int) -> RenderableType:
    """The plan for a terminal of `width` columns."""
    parts: list[RenderableType] = [Text(wording.summary(plan), style="bold"), Text()]
    for group in plan.groups:
        parts += [*_group(group, plan, width), Text()]
    for one in plan.unplaced:
        parts.append(Text(f"{one.job}: no place: {one.reason}", style="bold red"))
    return Group(*parts)


def _group(group: PlannedGroup, plan: PlanDocument, width: int) -> Iterator[RenderableType]:
    yield Text(f"{group.group}  {group.price_per_hour:.2f} $/h", style="bold")
    yield _jobs(group, plan)
    yield Text(wording.bound(group, plan))
    yield Text(wording.load(group.load))
    for node in group.nodes:
        yield Text(
            f"Resident on {node.node}: {', '.join(node.jobs)}; "
            f"{node.used_gb:,.0f} of {node.host_gb:,.0f} GB"
        )
    for job in group.jobs:
        yield Text(f"{job.job}: {job.reason}. Instead:")
        for one in _shown(job):
            yield Padding(Text(wording.alternative(one), style="dim"), (0, 0, 0, 4))
    yield from _picture(group, width)


def _shown(job: PlannedJob) -> Iterator[Alternative]:
    """The cheapest: what would cost less and why it is refused, then what could be had."""
    for admitted in (False, True):
        yield from islice((one for one in job.alternatives if one.admitted is admitted), _SHOWN)


def _jobs(group: PlannedGroup, plan: PlanDocument) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "job", "rollout | training"):
        table.add_column(name)
    for name in ("slow-down", f"at risk {plan.risk:.0%}", "SLO"):
        table.add_column(name, justify="right")
    actors = [job.job for job in group.jobs]
    for at, job in enumerate(group.jobs):
        promise = job.promise
        table.add_row(
            Text(letter(job.job, actors), style=_style(at)),
            Text(job.job),
            Text(wording.places(job)),
            f"{promise.mean:.2f}",
            f"{promise.bound:.2f}",
            f"{promise.slo:.2f}",
        )
    return table


def _picture(group: PlannedGroup, width: int) -> Iterator[RenderableType]:
    rows = [node.node for node in group.nodes]
    actors = [job.job for job in group.jobs]
    margin = max(map(len, rows)) + 3
    lines = gantt_text(
        rows,
        actors,
        [wording.stint(bar) for bar in group.bars],
        length_s=group.meta_iteration_s,
        columns=max(24, min(_COLUMNS_MAX, width - margin)),
    )
    styles = {letter(actor, actors): _style(at) for at, actor in enumerate(actors)}
    for row, line in lines:
        text = Text(f"  {row:{margin - 2}}")
        for cell in line:
            text.append(cell, style=styles.get(cell.upper(), "dim"))
        yield text
    yield Text(
        f"{'':{margin}}one iteration of the longest job, {group.meta_iteration_s:.0f} s; "
        "small letters: tails beside the next job",
        style="dim",
    )


def _style(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
