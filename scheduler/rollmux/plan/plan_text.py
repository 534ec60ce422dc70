"""A plan in the terminal: a table, reasons and a picture a group."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harvester.contracts.ids import JobId
from scheduler.rollmux.plan import wording
from scheduler.rollmux.plan.document import (
    Alternative,
    PlanDocument,
    PlannedGroup,
    PlannedJob,
    TimelineBar,
)

_COLOURS: Final = ("blue", "dark_orange", "green", "magenta", "yellow", "red", "cyan", "purple")
_SHOWN: Final = 2
"""Alternatives of each job that are refused, and that are not; the others are in the file."""
_COLUMNS_MAX: Final = 110
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
IDLE: Final = "·"


def plan_text(plan: PlanDocument, *, width: int) -> RenderableType:
    """The plan for a terminal of `width` columns."""
    parts: list[RenderableType] = [Text(wording.summary(plan), style="bold"), Text()]
    for group in plan.groups:
        parts += [*_group(group, plan, width), Text()]
    for one in plan.unplaced:
        parts.append(Text(f"{one.job}: no placement: {one.reason}", style="bold red"))
    return Group(*parts)


def _group(group: PlannedGroup, plan: PlanDocument, width: int) -> Iterator[RenderableType]:
    yield Text(f"{group.group}  {group.price_per_hour:.2f} $/h", style="bold")
    yield _jobs(group, plan)
    yield Text(wording.tightest_slo_text(group, plan))
    yield Text(wording.load_text(group.load))
    for node in group.nodes:
        yield Text(
            f"Resident on {node.node}: {', '.join(node.jobs)}; "
            f"{node.used_gb:,.0f} of {node.host_gb:,.0f} GB"
        )
    for job in group.jobs:
        yield Text(f"{job.job}: {job.reason}. Instead:")
        for one in _shown(job):
            yield Padding(Text(wording.alternative_text(one), style="dim"), (0, 0, 0, 4))
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
    letters = _letters(group)
    for at, job in enumerate(group.jobs):
        forecast = job.slo_forecast
        table.add_row(
            Text(letters[job.job], style=_style(at)),
            Text(job.job),
            Text(wording.placement_text(job)),
            f"{forecast.mean:.2f}",
            f"{forecast.bound:.2f}",
            f"{forecast.slo:.2f}",
        )
    return table


def _picture(group: PlannedGroup, width: int) -> Iterator[RenderableType]:
    margin = max(len(node.node) for node in group.nodes) + 3
    styles = {letter: _style(at) for at, letter in enumerate(_letters(group).values())}
    for row, line in gantt_lines(group, columns=max(24, min(_COLUMNS_MAX, width - margin))):
        text = Text(f"  {row:{margin - 2}}")
        for character in line:
            text.append(character, style=styles.get(character.upper(), "dim"))
        yield text
    yield Text(
        f"{'':{margin}}one iteration of the longest job, {group.meta_iteration_s:.0f} s; "
        "small letters: tails beside the next job",
        style="dim",
    )


def gantt_lines(group: PlannedGroup, *, columns: int) -> Iterator[tuple[str, str]]:
    """Each node's name and its line of letters; tails have a line below, in small letters."""
    for node in group.nodes:
        for tail in (False, True):
            bars = [one for one in group.bars if one.node == node.node and one.tail is tail]
            if bars or not tail:
                line = _line(group, bars, columns)
                yield ("", line.lower()) if tail else (node.node, line)


def _line(group: PlannedGroup, bars: Sequence[TimelineBar], columns: int) -> str:
    width_s = (group.meta_iteration_s or 1.0) / columns
    letters, line = _letters(group), [IDLE] * columns
    for one in bars:
        for at in range(columns):
            if one.start_s <= (at + 0.5) * width_s < one.end_s:
                line[at] = letters[one.job]
    return "".join(line)


def _letters(group: PlannedGroup) -> dict[JobId, str]:
    return {job.job: _LETTERS[at % len(_LETTERS)] for at, job in enumerate(group.jobs)}


def _style(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
