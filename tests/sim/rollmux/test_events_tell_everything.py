"""A stranger with the event log alone: dollars, kept promises, memory and permits, recomputed."""

import json
from collections import defaultdict
from typing import Any

import pytest

from scheduler.sim.rollmux.arms import ARMS, run_arm, summary
from scheduler.sim.rollmux.cluster import RunResult
from scheduler.sim.rollmux.workload import COLD_START_S, NODE_TYPES, Drift, SimulatedJob, w1

Events = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["ours", "rollmux_paper", "greedy"])
def told(request: pytest.FixtureRequest) -> tuple[list[SimulatedJob], RunResult, Events]:
    jobs = w1(5, jobs=24, drift=Drift.MIXED, wide_ratio=0.1)
    run = run_arm(request.param, jobs, seed=5, record=True)
    return jobs, run, json.loads(json.dumps(run.ledger.in_order()))


def test_node_times_times_prices_are_the_dollars(
    told: tuple[list[SimulatedJob], RunResult, Events],
) -> None:
    _, run, events = told
    up: dict[str, dict[str, Any]] = {}
    dollars = 0.0
    for event in events:
        if event["type"] == "node_up":
            assert event["node"] not in up
            up[event["node"]] = event
        elif event["type"] == "node_down":
            since = up.pop(event["node"])
            dollars += (event["t"] - since["t"]) / 3600 * since["price_per_hour"]
    assert not up
    assert dollars == pytest.approx(run.dollars)


def test_arrivals_and_ends_give_the_kept_promises(
    told: tuple[list[SimulatedJob], RunResult, Events],
) -> None:
    jobs, run, events = told
    arrived = {event["job"]: event["t"] for event in events if event["type"] == "arrival"}
    ended = {event["job"]: event["t"] for event in events if event["type"] == "job_done"}
    kept = sum(
        ended[one.job.job] - arrived[one.job.job]
        <= one.job.slowdown_slo * (COLD_START_S + float(one.lengths_s.sum())) + 1e-3
        for one in jobs
    )
    assert kept == summary(jobs, run).kept


def test_no_node_ever_holds_more_than_its_memory(
    told: tuple[list[SimulatedJob], RunResult, Events],
) -> None:
    jobs, _, events = told
    size = {one.job.job: one.job.host_bytes_per_node for one in jobs}
    limit = next(iter(NODE_TYPES.values())).host_bytes
    resident: dict[str, set[str]] = defaultdict(set)
    for event in events:
        if event["type"] == "loading":
            for node in event["nodes"]:
                resident[node].add(event["job"])
                assert sum(size[job] for job in resident[node]) <= limit
        elif event["type"] in ("left", "job_done"):
            for inside in resident.values():
                inside.discard(event["job"])


def test_no_permit_is_held_twice_and_only_resident_jobs_run(
    told: tuple[list[SimulatedJob], RunResult, Events],
) -> None:
    _, _, events = told
    holder: dict[str, str] = {}
    tails: dict[str, str] = {}
    up: set[str] = set()
    for event in events:
        node, job = event.get("node"), event.get("job")
        if event["type"] == "node_up":
            up.add(node)
        elif event["type"] == "node_down":
            up.discard(node)
        elif event["type"] == "phase_start":
            assert node in up
            assert holder.setdefault(node, job) == job
        elif event["type"] == "tail_moved":
            assert holder.pop(node) == job
            assert tails.setdefault(node, job) == job
        elif event["type"] == "phase_end":
            if holder.get(node) == job:
                del holder[node]
            else:
                assert tails.pop(node) == job


def test_every_job_ran_all_of_its_phases_and_none_faster_than_alone(
    told: tuple[list[SimulatedJob], RunResult, Events],
) -> None:
    jobs, _, events = told
    began: dict[tuple[str, str], float] = {}
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event["type"] not in ("phase_start", "phase_end"):
            continue
        key = (event["job"], event["phase"])
        if event["type"] == "phase_start":
            began.setdefault(key, event["t"])
        elif key in began:
            spent[key].append(event["t"] - began.pop(key))
    for one in jobs:
        for column, phase in enumerate(("rollout", "training")):
            lengths_s = one.lengths_s[:, column]
            found = spent[one.job.job, phase]
            assert len(found) == len(lengths_s)
            assert all(a >= b - 1e-3 for a, b in zip(found, lengths_s, strict=True))


@pytest.mark.parametrize("arm", sorted(ARMS))
def test_the_same_seed_tells_the_same_story(arm: str) -> None:
    jobs = w1(8, jobs=8)
    first, second = (run_arm(arm, jobs, seed=8, record=True) for _ in range(2))
    assert first.ledger.events == second.ledger.events
