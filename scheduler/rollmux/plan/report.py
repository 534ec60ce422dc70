"""A plan as one HTML file."""

from scheduler.pictures.gantt import gantt_svg
from scheduler.pictures.page import Markup, heading, page, section, table, verdict
from scheduler.rollmux.plan import wording
from scheduler.rollmux.plan.document import PlanDocument, PlannedGroup


def plan_page(plan: PlanDocument, *, title: str) -> str:
    sections = [_group(group, plan) for group in plan.groups]
    if plan.unplaced:
        rows = [[one.job, one.reason] for one in plan.unplaced]
        sections.append(section("No place found", table(["job", "why"], rows)))
    return page(title, wording.summary(plan), sections)


def _group(group: PlannedGroup, plan: PlanDocument) -> Markup:
    return section(
        f"{group.group}, {group.price_per_hour:.2f} $/h",
        _promises(group, plan),
        wording.bound(group, plan),
        wording.load(group.load),
        heading("One meta-iteration, from one rollout of the longest job to its next"),
        _picture(group),
        heading("Resident in host memory"),
        table(
            ["node", "jobs", "GB used", "GB"],
            [[one.node, ", ".join(one.jobs), one.used_gb, one.host_gb] for one in group.nodes],
        ),
        heading("Why here, and what else there is"),
        table(
            ["job", "here because", "instead", "$/h", "admitted"],
            [
                [
                    job.job,
                    job.reason,
                    f"{one.kind} {'beside ' + ', '.join(one.beside) if one.beside else 'alone'}",
                    f"{one.change_per_hour:+.2f}",
                    verdict(one.admitted, "yes" if one.admitted else one.reason),
                ]
                for job in group.jobs
                for one in job.alternatives
            ],
        ),
    )


def _promises(group: PlannedGroup, plan: PlanDocument) -> Markup:
    head = ["job", "rollout | training", "slow-down", f"at risk {plan.risk:.0%}", "SLO", "risk"]
    return table(
        head,
        [
            [
                job.job,
                wording.places(job),
                job.promise.mean,
                job.promise.bound,
                job.promise.slo,
                f"{job.promise.risk:.1%}",
            ]
            for job in group.jobs
        ],
    )


def _picture(group: PlannedGroup) -> Markup:
    return Markup(
        gantt_svg(
            [node.node for node in group.nodes],
            [job.job for job in group.jobs],
            [wording.stint(bar) for bar in group.bars],
            length_s=group.meta_iteration_s,
            alt=f"Which job of {group.group} is on which node during one meta-iteration",
        )
    )
