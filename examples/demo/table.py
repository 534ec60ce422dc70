"""The command's output: the closing table, and one line at a time while it runs."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from examples.demo import wording
from examples.demo.records import DemoArm, TrainingStep
from examples.demo.schema import Result


def closing(result: Result) -> RenderableType:
    """Figures by arm, ratios with intervals, checks, and the run in one sentence."""
    return Group(_figures(result), _ratios(result), _checks(result), Text(wording.summary(result)))


def step_line(step: TrainingStep, *, guests: frozenset[str]) -> str:
    """One training step: its time, rollout speed, harvested share and reward."""
    harvested = sum(n for engine, n in step.tokens_by_engine.items() if engine in guests)
    share = harvested / step.rollout_tokens if step.rollout_tokens else None
    speed = step.rollout_tokens / step.rollout_s if step.rollout_s > 0 else None
    return (
        f"{wording.ARM_TITLES[step.arm]}: step {step.step} in {step.step_s:.1f} s, "
        f"{wording.fixed_point(speed, 0)} rollout tokens/s, {wording.percent(share, 0)} harvested, "
        f"reward {step.reward_mean:.2f} ± {step.reward_se:.2f}"
    )


def _figures(result: Result) -> Table:
    table = Table(title=Text(f"RoseMux demo: {result.trace}"), title_justify="left")
    table.add_column("")
    for arm in DemoArm:
        table.add_column(wording.ARM_TITLES[arm], justify="right")
    for row in wording.arm_rows(result):
        table.add_row(*row)
    return table


def _ratios(result: Result) -> Table:
    table = Table(title="Production beside a job, over production alone", title_justify="left")
    table.add_column(f"95 % interval over rounds ({wording.MISSING}: too few rounds)")
    for arm in (DemoArm.FIXED, DemoArm.HARVEST):
        table.add_column(wording.ARM_TITLES[arm], justify="right")
    for row in wording.ratio_rows(result):
        table.add_row(*row)
    return table


def _checks(result: Result) -> Table:
    table = Table(title="Pass criteria", title_justify="left")
    for name in ("", "value", "limit", ""):
        table.add_column(name, justify="right" if name == "value" else "left")
    for check in result.checks:
        verdict = Text("ok", style="green") if check.ok else Text("not ok", style="bold red")
        table.add_row(check.name, wording.number(check.value, 3), check.limit, verdict)
    return table
