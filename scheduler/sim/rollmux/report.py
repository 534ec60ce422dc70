"""A comparison of arms in the terminal, as a page with curves, and as a file of events."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harvester.contracts.errors import ConfigError
from scheduler.pictures.charts import Bar, Series, Words, bars, curves, stacked
from scheduler.pictures.page import Markup, page, section, table
from scheduler.pictures.svg import colour
from scheduler.sim.rollmux.arms import SLO_COUNTS_QUEUEING, WINDOW_GOAL
from scheduler.sim.rollmux.comparison import Arm, ArmComparison
from scheduler.sim.rollmux.ledger import Ledger

TITLES: Final = {
    "ours": "RoseMux",
    "rollmux_paper": "RollMux",
    "random": "Random",
    "greedy": "Greedy",
    "solo_d": "Solo-D",
    "verl": "veRL",
    "gavel": "Gavel+",
}
_HEAD: Final = (
    "",
    "dollars",
    "over ours",
    "SLOs kept",
    "worst window",
    f"above {WINDOW_GOAL:g}",
    "moves",
)
_COLOURS: Final = {name: colour(at) for at, name in enumerate(TITLES)}


def summary(found: ArmComparison) -> str:
    ours, alone = found.arm("ours"), found.arm("solo_d")
    return (
        f"Simulated, not measured: {found.jobs} jobs over {found.hours:.0f} h, seed {found.seed}. "
        f"RoseMux spends {ours.dollars:,.0f} $ and keeps {ours.slo_attainment:.1%} of the SLOs; "
        f"on nodes of their own the jobs cost {alone.over_ours:.2f} times as much, under RollMux "
        f"{found.arm('rollmux_paper').over_ours:.2f} times. {_CLOCK}"
    )


def printed(found: ArmComparison) -> RenderableType:
    shown = Table(box=None, pad_edge=False)
    for name in _HEAD:
        shown.add_column(name, justify="right" if name else "left")
    for arm in found.arms:
        shown.add_row(*_row(arm))
    return Group(Text(summary(found), style="bold"), Text(), shown)


def comparison_page(found: ArmComparison) -> str:
    drawn = [arm for arm in found.arms if arm.dollars_per_hour]
    shared = [arm for arm in found.arms if arm.slowdowns_over_slo]
    sections = [
        section("Arms", table(_HEAD, [_row(arm) for arm in found.arms]), _WINDOW),
        section("What it costs", Markup(_prices(drawn, found.hours))),
        section("Share of kept SLOs", Markup(_kept(found.arms)), Markup(_slowdowns(shared))),
        section("How jobs are grouped", Markup(_groups(found))),
    ]
    return page("RoseMux simulation", summary(found), sections)


def write_events(ledger: Ledger, path: Path) -> None:
    """JSON lines in the order of time. Raises ConfigError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for event in ledger.in_order():
                file.write(json.dumps(event) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


_CLOCK: Final = (
    "An SLO counts from a job's arrival, queueing included."
    if SLO_COUNTS_QUEUEING
    else "An SLO counts from a job's placement, queueing not included."
)
_WINDOW: Final = (
    "Worst window: the largest slow-down over any 20 iterations of one job in a row, as a ratio of "
    "its SLO, which is promised for the whole run only; beside it the jobs that were slower there "
    f"than {WINDOW_GOAL:g} times their SLO. {_CLOCK}"
)


def _row(arm: Arm) -> list[str]:
    return [
        TITLES[arm.name],
        f"{arm.dollars:,.0f}",
        f"{arm.over_ours:.3f}",
        f"{arm.slo_attainment:.1%}",
        "" if arm.worst_window is None else f"{arm.worst_window:.2f}",
        "" if arm.windows_above_goal is None else str(arm.windows_above_goal),
        "" if arm.moves is None else str(arm.moves),
    ]


def _prices(arms: Sequence[Arm], hours: float) -> str:
    return curves(
        [
            Series(
                name=TITLES[arm.name],
                colour=_COLOURS[arm.name],
                points=_over_time(arm.dollars_per_hour, hours),
            )
            for arm in arms
        ],
        Words(
            title="Price of all nodes that are up",
            x="hours from the first arrival",
            y="$ an hour",
            alt="Dollars an hour over time, one curve an arm",
        ),
    )


def _kept(arms: Sequence[Arm]) -> str:
    return bars(
        [
            Bar(
                name=TITLES[arm.name],
                value=arm.slo_attainment,
                words=f"{arm.slo_attainment:.1%}",
                colour=_COLOURS[arm.name],
            )
            for arm in arms
        ],
        title="Jobs that kept their SLO",
        alt="Share of jobs that kept their SLO, one bar an arm",
        most=1.0,
    )


def _slowdowns(arms: Sequence[Arm]) -> str:
    return curves(
        [
            Series(
                name=TITLES[arm.name],
                colour=_COLOURS[arm.name],
                points=[
                    (ratio, (at + 1) / len(arm.slowdowns_over_slo))
                    for at, ratio in enumerate(arm.slowdowns_over_slo)
                ],
            )
            for arm in arms
        ],
        Words(
            title="Jobs up to a slow-down; right of the dashed line the SLO is missed",
            x="slow-down over SLO",
            y="share of jobs",
            alt="Cumulative share of jobs by slow-down over SLO, one curve an arm",
        ),
        limit_x=1.0,
    )


def _groups(found: ArmComparison) -> str:
    return stacked(
        [
            Series(
                name=f"of {jobs} job{'s' if jobs > 1 else ''}",
                colour=colour(jobs - 1),
                points=_over_time(counts, found.hours),
            )
            for jobs, counts in enumerate(found.group_sizes, start=1)
        ],
        Words(
            title="RoseMux's groups by their number of jobs",
            x="hours from the first arrival",
            y="groups",
            alt="Number of groups over time, stacked by how many jobs they have",
        ),
    )


def _over_time(values: Sequence[float], hours: float) -> list[tuple[float, float]]:
    """Points of a curve at the middle of each bin."""
    return [((at + 0.5) * hours / len(values), value) for at, value in enumerate(values)]
