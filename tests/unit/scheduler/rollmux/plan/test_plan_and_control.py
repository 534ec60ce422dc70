"""One planner: a plan and a control of as many nodes group the jobs of a file the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import Pool
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.rollmux.cluster.config import ClusterConfig, PoolNodes
from scheduler.rollmux.control.nodes_file import read_specs
from scheduler.rollmux.permits.job_permit import JobPermit
from scheduler.rollmux.plan.drafting import FREE_MOVES, draft
from scheduler.rollmux.plan.jobs_file import PlanSettings, read_jobs
from scheduler.rollmux.planner.planner import GroupPlanner

REVIEWS = 12


Grouped = tuple[set[tuple[frozenset[str], int]], set[str]]
"""Jobs and number of nodes of each group, and jobs without a placement."""


class NoPermits:
    def permit(self, job: JobId) -> JobPermit | None:
        return None


def _job(name: str, rollout_s: float, training_s: float, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "slo": 1.6,
        "host_gb": 400,
        "rollout": {"max_s": rollout_s / 0.8, "mean_s": rollout_s, "cv": 0.05},
        "training": {"max_s": training_s / 0.8, "mean_s": training_s, "cv": 0.05},
    } | more


def _file(path: Path, jobs: list[dict[str, Any]], *, count: int) -> Path:
    pool = {"host_gb": 1000, "count": count}
    nodes = {
        "rollout": {"type": "h20", "price_per_hour": 15, **pool},
        "training": {"type": "h800", "price_per_hour": 40, **pool},
    }
    path.write_text(json.dumps({"nodes": nodes, "jobs": jobs}))
    return path


def _planned(settings: PlanSettings) -> Grouped:
    """Groups and unplaced jobs by `rosemux plan`."""
    plan = draft(settings)
    groups = {
        (frozenset(map(str, (one.job for one in group.jobs))), len(group.nodes))
        for group in plan.groups
    }
    return groups, {str(one.job) for one in plan.unplaced}


def _controlled(path: Path, settings: PlanSettings) -> Grouped:
    """Groups and unplaced jobs by a control on as many nodes, with free moves too."""
    sides = ((Pool.ROLLOUT, settings.nodes.rollout), (Pool.TRAINING, settings.nodes.training))
    pools = [
        PoolNodes(
            type=one.as_type, names=tuple(NodeId(f"{pool}.{at}") for at in range(one.count or 0))
        )
        for pool, one in sides
    ]
    config = ClusterConfig(rollout=pools[0], training=pools[1])
    free = replace(config.planner, prices=FREE_MOVES, recheck_s=0.0)
    planner = GroupPlanner(config.judge, config.types, free)
    policy = ClusterPolicy(config, NoPermits(), planner)
    for submission in read_specs(path):
        policy.submit(submission, now=0.0)
    for _ in range(REVIEWS):
        policy.review(now=0.0)
    cells = policy.planner.table.groups.values()
    placed = {
        (frozenset(map(str, group.pinned)), len(group.rollout) + len(group.training))
        for group in cells
        if group.pinned
    }
    return placed, {str(job) for job in policy.placements if job not in policy.planner.facts}


TIGHT = "a tight SLO earns nothing by what was measured"
MIXES = {
    "two that fit": [_job("a", 300, 200), _job("b", 250, 250)],
    # Measured over 40 phases, its SLO would have earned the credit for company: it has not run.
    TIGHT: [_job("a", 450, 150, slo=1.05), _job("b", 8, 4, slo=90.0)],
    "more than the nodes take": [_job(name, 200, 400, slo=1.05) for name in "abcde"],
    "a place beside others where its own nodes lack": [
        *(_job(name, 100, 300) for name in "abcd"),
        _job("e", 100, 100, slo=3.0),
    ],
    "moved together once all are there": [
        _job("a", 400, 100, slo=1.4),
        _job("b", 100, 400, slo=1.4),
        _job("c", 390, 110, slo=1.4),
        _job("d", 110, 390, slo=1.4),
    ],
    "tails that make room": [
        _job(name, 300, 100, slo=1.3, responses=[[0.3, 0.8]]) for name in "abcd"
    ],
    "a rollout that is not divisible": [
        _job("a", 300, 100, slo=1.3, responses=[[0.3, 0.8]]),
        _job("b", 300, 100, slo=1.3, rollout={"max_s": 375, "mean_s": 300, "divisible": False}),
    ],
    "weight syncs": [
        _job(name, 150, 250, slo=1.25, sync={"max_s": 260, "mean_s": 200}) for name in "abcd"
    ],
    "one of which nothing is known": [
        _job("a", 300, 200),
        _job("b", 250, 250, rollout={"max_s": 375}),
    ],
}


@pytest.mark.parametrize("name", MIXES)
def test_a_plan_and_a_control_group_the_same_jobs_alike(name: str, tmp_path: Path) -> None:
    path = _file(tmp_path / "jobs.yaml", MIXES[name], count=4)
    settings = read_jobs(path)
    assert _planned(settings) == _controlled(path, settings)


def test_a_job_of_a_tight_slo_begins_alone_however_well_it_was_measured(tmp_path: Path) -> None:
    path = _file(tmp_path / "jobs.yaml", MIXES[TIGHT], count=4)
    groups, _ = _planned(read_jobs(path))
    assert groups == {(frozenset({"a"}), 2), (frozenset({"b"}), 2)}
