"""A plan as one HTML file; apart from the command because it needs the extra `report`."""

from scheduler.report_page import COLOURS, INK, Markup, chart, colour, page, svg, titled
from scheduler.rollmux.plan import wording
from scheduler.rollmux.plan.document import PlanDocument, PlannedGroup

_ROW_INCHES = 0.42


def plan_page(plan: PlanDocument, *, title: str) -> str:
    return page(
        __package__,
        "plan_page.html",
        title=title,
        plan=plan,
        wording=wording,
        pictures={group.group: _gantt(group) for group in plan.groups},
    )


def _gantt(group: PlannedGroup) -> Markup:
    """Jobs over the group's nodes; a tail on a part of a node is a thin bar below the others."""
    nodes = {resident.node: row for row, resident in enumerate(group.nodes)}
    colours = {job.job: colour(at) for at, job in enumerate(group.jobs)}
    with chart(_ROW_INCHES * len(nodes) + 1.0) as figure:
        axes = figure.subplots()
        for bar in group.bars:
            length_s = bar.end_s - bar.start_s
            row, height = nodes[bar.node] + (0.35 if bar.tail else 0.0), 0.2 if bar.tail else 0.5
            words = f"{bar.job}: {bar.phase}{', tail' if bar.tail else ''}"
            axes.barh(
                row,
                length_s,
                height,
                left=bar.start_s,
                color=colours[bar.job],
                gid=titled(f"{words}, {bar.start_s:.0f} to {bar.end_s:.0f} s"),
            )
            if not bar.tail and length_s > 0.012 * len(bar.job) * group.meta_iteration_s:
                axes.annotate(
                    bar.job, (bar.start_s, row), (4, 0), textcoords="offset points", va="center"
                ).set(color="white", fontsize=8)
        axes.set(xlim=(0.0, group.meta_iteration_s), ylim=(len(nodes) - 0.4, -0.5), xlabel="s")
        axes.set_yticks(list(nodes.values()), list(nodes), color=INK)
        axes.grid(visible=False, axis="y")
        for job, shade in colours.items():
            axes.bar(0.0, 0.0, color=shade, label=job)
        figure.legend(loc="outside lower center", ncols=len(COLOURS))
        alt = f"Jobs of {group.group} on their nodes during one meta-iteration"
        return svg(figure, alt=alt)
