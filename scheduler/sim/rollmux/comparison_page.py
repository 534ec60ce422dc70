"""A comparison of arms as one HTML file with charts."""

from collections.abc import Sequence

from scheduler.report_page import GRID, LIMIT, Axes, Markup, chart, colour, page, svg, titled
from scheduler.sim.rollmux.comparison import ArmComparison, ArmSummary
from scheduler.sim.rollmux.comparison_text import HEAD, TITLES, WINDOW, row, summary

_COLOURS = {name: colour(at) for at, name in enumerate(TITLES)}


def comparison_page(found: ArmComparison) -> str:
    return page(
        __package__,
        "comparison_page.html",
        title="RoseMux simulation",
        summary=summary(found),
        head=HEAD,
        rows=[row(arm) for arm in found.arms],
        window=WINDOW,
        prices=_prices(found),
        kept=_kept(found.arms),
        slowdowns=_slowdowns(found.arms),
        groups=_groups(found),
    )


def _prices(found: ArmComparison) -> Markup:
    with chart(3.6) as figure:
        axes = figure.subplots()
        for arm in found.arms:
            if arm.dollars_per_hour:
                hours = _middles_h(arm.dollars_per_hour, found.hours)
                _curve(axes, arm, hours, arm.dollars_per_hour)
        axes.set(title="Price of all nodes that are up", ylabel="$ an hour")
        axes.set(xlabel="hours from the first arrival", xlim=(0, found.hours))
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside right upper")
        return svg(figure, alt="Dollars an hour over time, one curve an arm")


def _kept(arms: Sequence[ArmSummary]) -> Markup:
    with chart(0.32 * len(arms) + 0.8) as figure:
        axes = figure.subplots()
        for at, arm in enumerate(arms):
            share = f"{arm.slo_attainment:.1%}"
            axes.barh(at, 100.0, 0.6, color=GRID)
            kept = 100 * arm.slo_attainment
            axes.barh(at, kept, 0.6, color=_COLOURS[arm.name], gid=titled(share))
            axes.annotate(share, (100.0, at), (6, 0), textcoords="offset points", va="center")
        axes.set(title="Jobs that kept their SLO", xlim=(0, 100), ylim=(len(arms) - 0.5, -0.5))
        axes.set_yticks(range(len(arms)), [TITLES[arm.name] for arm in arms])
        axes.set_xlabel("% of the jobs")
        axes.grid(visible=False)
        return svg(figure, alt="Share of jobs that kept their SLO, one bar an arm")


def _slowdowns(arms: Sequence[ArmSummary]) -> Markup:
    with chart(3.6) as figure:
        axes = figure.subplots()
        axes.axvline(1.0, color=LIMIT, linestyle="--", linewidth=1.2)
        for arm in arms:
            if count := len(arm.slowdowns_over_slo):
                shares = [(at + 1) / count for at in range(count)]
                _curve(axes, arm, arm.slowdowns_over_slo, shares)
        axes.set(
            title="Jobs up to a slow-down; right of the dashed line the SLO is missed",
            xlabel="slow-down over SLO",
            ylabel="share of jobs",
        )
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside right upper")
        return svg(figure, alt="Cumulative share of jobs by slow-down over SLO, one curve an arm")


def _groups(found: ArmComparison) -> Markup:
    with chart(3.6) as figure:
        axes = figure.subplots()
        names = [f"of {size} job{'s' if size > 1 else ''}" for size, _ in _sizes(found)]
        axes.stackplot(
            _middles_h(found.group_sizes[0], found.hours),
            *(counts for _, counts in _sizes(found)),
            labels=names,
            colors=[colour(at) for at in range(len(names))],
            alpha=0.75,
        )
        axes.set(title="RoseMux's groups by their number of jobs", ylabel="groups")
        axes.set(xlabel="hours from the first arrival", xlim=(0, found.hours))
        figure.legend(loc="outside right upper")
        alt = "Number of groups over time, stacked by how many jobs they have"
        return svg(figure, alt=alt)


def _sizes(found: ArmComparison) -> list[tuple[int, tuple[float, ...]]]:
    return list(enumerate(found.group_sizes, start=1))


def _curve(axes: Axes, arm: ArmSummary, x: Sequence[float], y: Sequence[float]) -> None:
    title = TITLES[arm.name]
    axes.plot(x, y, color=_COLOURS[arm.name], label=title, linewidth=1.6, gid=titled(title))


def _middles_h(values: Sequence[float], hours: float) -> list[float]:
    """The middle of each bin, in hours from the start."""
    return [(at + 0.5) * hours / len(values) for at in range(len(values))]
