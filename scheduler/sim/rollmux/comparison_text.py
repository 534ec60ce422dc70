"""A comparison of arms in words and as a table for the terminal."""

from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scheduler.sim.rollmux.arms import WINDOW_GOAL
from scheduler.sim.rollmux.comparison import ArmComparison, ArmSummary

TITLES: Final = {
    "ours": "RoseMux",
    "rollmux_paper": "RollMux",
    "random": "Random",
    "greedy": "Greedy",
    "solo_d": "Solo-D",
    "verl": "veRL",
    "gavel": "Gavel+",
}
HEAD: Final = (
    "",
    "dollars",
    "over ours",
    "SLOs kept",
    "worst window",
    f"above {WINDOW_GOAL:g}",
    "moves",
)
CLOCK: Final = "An SLO counts from a job's arrival, queueing included."
WINDOW: Final = (
    "Worst window: the largest slow-down over any 20 iterations of one job in a row, as a ratio of "
    "its SLO, which is promised for the whole run only; beside it the jobs that were slower there "
    f"than {WINDOW_GOAL:g} times their SLO. {CLOCK}"
)


def summary(found: ArmComparison) -> str:
    ours, alone = found.arm("ours"), found.arm("solo_d")
    return (
        f"Simulated, not measured: {found.jobs} jobs over {found.hours:.0f} h, seed {found.seed}. "
        f"RoseMux spends {ours.dollars:,.0f} $ and keeps {ours.slo_attainment:.1%} of the SLOs; "
        f"on nodes of their own the jobs cost {alone.over_ours:.2f} times as much, under RollMux "
        f"{found.arm('rollmux_paper').over_ours:.2f} times. {CLOCK}"
    )


def comparison_text(found: ArmComparison) -> RenderableType:
    shown = Table(box=None, pad_edge=False)
    for name in HEAD:
        shown.add_column(name, justify="right" if name else "left")
    for arm in found.arms:
        shown.add_row(*row(arm))
    return Group(Text(summary(found), style="bold"), Text(), shown)


def row(arm: ArmSummary) -> list[str]:
    return [
        TITLES[arm.name],
        f"{arm.dollars:,.0f}",
        f"{arm.over_ours:.3f}",
        f"{arm.slo_attainment:.1%}",
        "" if arm.worst_window is None else f"{arm.worst_window:.2f}",
        "" if arm.windows_above_goal is None else str(arm.windows_above_goal),
        "" if arm.moves is None else str(arm.moves),
    ]
