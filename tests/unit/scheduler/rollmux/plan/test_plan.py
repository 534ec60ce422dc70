"""A plan of given jobs: shared nodes, reasons and forecasts of SLOs."""

import io
import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from harvester.cli import main
from scheduler.model import PhaseKind
from scheduler.rollmux.plan.document import PlanDocument, TimelineBar
from scheduler.rollmux.plan.drafting import draft
from scheduler.rollmux.plan.jobs_file import PlanSettings
from scheduler.rollmux.plan.plan_page import plan_page
from scheduler.rollmux.plan.plan_text import IDLE, gantt_lines, plan_text

ROLLOUT, TRAINING = PhaseKind.ROLLOUT, PhaseKind.TRAINING


def job(name: str, rollout_s: float, training_s: float, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "slo": 1.6,
        "host_gb": 400,
        "rollout": {"max_s": rollout_s / 0.8, "mean_s": rollout_s, "cv": 0.05},
        "training": {"max_s": training_s / 0.8, "mean_s": training_s, "cv": 0.05},
    } | more


def settings(*jobs: dict[str, Any], rollout: Any = None, training: Any = None) -> PlanSettings:
    return PlanSettings.model_validate(
        {
            "nodes": {
                "rollout": {"type": "h20", "price_per_hour": 15, "host_gb": 1000, "count": rollout},
                "training": {
                    "type": "h800",
                    "price_per_hour": 40,
                    "host_gb": 1000,
                    "count": training,
                },
            },
            "jobs": jobs,
        }
    )


@pytest.fixture(scope="module")
def pair() -> PlanDocument:
    return draft(settings(job("a", 300, 200), job("b", 250, 250)))


def test_two_jobs_that_fit_share_a_group_at_the_price_of_one(pair: PlanDocument) -> None:
    (group,) = pair.groups
    assert {one.job for one in group.jobs} == {"a", "b"}
    assert (pair.price_per_hour, pair.dedicated_per_hour) == (55, 110)
    assert pair.nodes == {"h20": 1, "h800": 1}
    assert all(one.slo_forecast.bound <= one.slo_forecast.slo for one in group.jobs)
    assert group.bound_by == min(group.jobs, key=lambda one: one.slo_forecast.slack).job


def test_nodes_that_cost_nothing_are_planned() -> None:
    given = settings(job("a", 300, 200), job("b", 250, 250), rollout=1, training=1)
    free = {"price_per_hour": 0}
    pools = {
        "rollout": given.nodes.rollout.model_copy(update=free),
        "training": given.nodes.training.model_copy(update=free),
    }
    nodes = given.nodes.model_copy(update=pools)
    plan = draft(given.model_copy(update={"nodes": nodes}))
    (group,) = plan.groups
    assert {one.job for one in group.jobs} == {"a", "b"}
    assert (plan.price_per_hour, plan.dedicated_per_hour, plan.unplaced) == (0, 0, ())


def test_nodes_of_its_own_are_an_alternative_at_their_price(pair: PlanDocument) -> None:
    for one in pair.groups[0].jobs:
        (alone,) = [each for each in one.alternatives if each.kind == "new isolated group"]
        assert (alone.change_per_hour, alone.admitted, alone.beside) == (55, True, ())


def test_the_picture_shows_no_node_twice_and_every_phase(pair: PlanDocument) -> None:
    (group,) = pair.groups
    for node in group.nodes:
        whole = sorted(
            (bar.start_s, bar.end_s) for bar in group.bars if bar.node == node.node and not bar.tail
        )
        assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(whole))
    seen = {(bar.job, bar.phase) for bar in group.bars}
    assert seen == {(name, phase) for name in ("a", "b") for phase in (ROLLOUT, TRAINING)}
    assert all(0 <= bar.start_s <= bar.end_s <= group.meta_iteration_s for bar in group.bars)


def test_memory_keeps_apart_what_time_would_not() -> None:
    plan = draft(settings(job("a", 300, 200, host_gb=600), job("b", 250, 250, host_gb=600)))
    assert len(plan.groups) == 2
    (first, *_) = plan.groups[0].jobs
    assert any("host memory" in each.reason for each in first.alternatives if not each.admitted)
    assert all(node.used_gb <= node.host_gb for group in plan.groups for node in group.nodes)


def test_a_refused_place_names_the_slo_that_would_not_hold() -> None:
    plan = draft(settings(job("a", 200, 400, slo=1.05), job("b", 200, 400, slo=1.05)))
    assert plan.nodes["h800"] == 2
    reasons = [
        each.reason
        for group in plan.groups
        for one in group.jobs
        for each in one.alternatives
        if not each.admitted
    ]
    assert any(
        re.search(r"[ab] would be slowed \d\.\d\d times, its SLO is 1\.05", r) for r in reasons
    )


def test_an_unplaced_job_names_the_missing_nodes() -> None:
    tight = [job(name, 200, 400, slo=1.05) for name in "abc"]
    plan = draft(settings(*tight, rollout=2, training=2))
    assert [(one.job, "1 h800 of which 0 are free" in one.reason) for one in plan.unplaced] == [
        ("c", True)
    ]
    assert plan.nodes["h800"] == 2


def test_a_supply_is_kept_also_where_more_nodes_would_be_chosen() -> None:
    # Alone on a third rollout node c would fit by price; with two it goes where it is admitted.
    jobs = [job("a", 100, 300), job("b", 100, 300), job("c", 100, 100, slo=3.0)]
    plan = draft(settings(*jobs, rollout=2, training=2))
    assert plan.nodes["h20"] <= 2
    assert plan.nodes["h800"] <= 2
    assert not plan.unplaced


def test_a_job_that_nothing_is_known_of_is_planned_with_more_doubt() -> None:
    known = draft(settings(job("a", 300, 200), job("b", 250, 250)))
    unknown = {"max_s": 375}
    doubtful = draft(settings(job("a", 300, 200), job("b", 250, 250, rollout=unknown)))
    spread = [
        max(
            one.slo_forecast.bound - one.slo_forecast.mean
            for group in plan.groups
            for one in group.jobs
        )
        for plan in (known, doubtful)
    ]
    assert spread[1] > spread[0]


def test_a_group_says_how_full_it_is(pair: PlanDocument) -> None:
    (group,) = pair.groups
    assert group.load.cycle_s == pytest.approx(500.0, rel=0.01)
    assert group.load.busiest_s == pytest.approx(550.0, rel=0.01)
    assert group.load.share == pytest.approx(1.1)


def test_terminal_and_page_show_every_job_and_the_page_loads_nothing(pair: PlanDocument) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(plan_text(pair, width=100))
    shown = console.export_text()
    html = plan_page(pair, title="a <plan>")
    for name in ("group-1", "h20-1", "h800-1", "new isolated group"):
        assert name in shown
        assert name in html
    assert "a &lt;plan&gt;" in html
    assert not re.search(r'(?:src|href)="(?!#)|@import|url\((?!#)', html)
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(svg)


def test_a_text_picture_shows_the_jobs_of_each_node(pair: PlanDocument) -> None:
    (group,) = pair.groups
    first, *others = (resident.node for resident in group.nodes)
    a, b = (job.job for job in group.jobs)
    bars = tuple(
        TimelineBar(node=first, job=job, phase=ROLLOUT, start_s=start_s, end_s=end_s, tail=tail)
        for job, start_s, end_s, tail in ((a, 0, 50, False), (a, 50, 75, True), (b, 50, 100, False))
    )
    lines = gantt_lines(replace(group, bars=bars, meta_iteration_s=100.0), columns=8)
    assert list(lines) == [
        (first, "AAAABBBB"),
        ("", f"{IDLE * 4}aa{IDLE * 2}"),
        *((node, IDLE * 8) for node in others),
    ]


def test_the_example_is_planned_written_and_drawn(
    repository_examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "plan.json", tmp_path / "deep" / "plan.html"
    with pytest.raises(SystemExit) as left:
        main(
            [
                "plan",
                str(repository_examples / "jobs.yaml"),
                "--json",
                str(out),
                "--html",
                str(page),
            ]
        )
    assert left.value.code == 0
    plan = msgspec.json.decode(out.read_bytes(), type=PlanDocument)
    assert {one.job for group in plan.groups for one in group.jobs} == {
        "math-7b",
        "code-14b",
        "tools-7b",
        "agent-32b",
    }
    assert plan.price_per_hour < plan.dedicated_per_hour
    assert "agent-32b" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


def test_a_wrong_file_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text("jobs: []\n")
    with pytest.raises(SystemExit) as left:
        main(["plan", str(path)])
    assert left.value.code == 2
    assert "line 1: jobs" in capsys.readouterr().err


def test_without_any_node_every_job_is_unplaced_and_the_price_is_zero() -> None:
    plan = draft(settings(job("a", 300, 200), rollout=0))
    assert (plan.groups, plan.price_per_hour) == ((), 0)
    assert [one.job for one in plan.unplaced] == ["a"]
    assert "1 h20 of which 0 are free" in plan.unplaced[0].reason
    assert "No placement found" in plan_page(plan, title="none")


def test_a_weight_sync_makes_room_for_company_and_is_shown() -> None:
    def planned(training_s: float, **more: Any) -> PlanDocument:
        return draft(settings(*(job(name, 200, training_s, slo=1.3, **more) for name in "abc")))

    synced = planned(200, sync={"max_s": 260, "mean_s": 200, "cv": 0.0})
    assert synced.nodes["h800"] < planned(400).nodes["h800"] == 3
    assert synced.groups[0].load.cycle_s == pytest.approx(600.0, rel=0.01)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(plan_text(synced, width=120))
    assert "| sync 200 s" in console.export_text()
    assert "| sync 200 s" in plan_page(synced, title="synced")


def test_a_plan_says_from_when_on_slos_count(pair: PlanDocument) -> None:
    counted = msgspec.structs.replace(pair, slo_counts_queueing=True)
    for plan, said in ((pair, "from the placement on"), (counted, "from the submission on")):
        assert said in plan_page(plan, title="a plan")
