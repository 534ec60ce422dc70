"""A stranger with the file of events alone: dollars, kept promises, memory and permits, recomputed.

The stranger's figures are compared with the run's own; nothing of the run is used to find them.
"""

import json
from collections import defaultdict
from typing import Any

import pytest

from benchmarks.rollmux.arms import ARMS
from benchmarks.rollmux.determinism import events_digest
from scheduler.sim.rollmux.arms import arm_result, run_arm
from scheduler.sim.rollmux.disruptions import UNDISTURBED, Disruptions
from scheduler.sim.rollmux.ledger import RunResult, write_events
from scheduler.sim.rollmux.workload import PAPER_WORLD, Drift, SimulatedJob, World, w1

Events = list[dict[str, Any]]
Told = tuple[list[SimulatedJob], RunResult, Events]
SYNCED = Disruptions(seed=2)
"""Nothing fails, and weights take 20 s to the engines."""
HARSH = Disruptions(seed=1, node_mtbf_s=40 * 3600.0, leaving_ratio=0.2)


@pytest.fixture(
    scope="module",
    params=[
        ("ours", 10, UNDISTURBED),
        ("ours", 8, SYNCED),
        ("rollmux_paper", 16, UNDISTURBED),
        ("greedy", 16, UNDISTURBED),
        ("ours", 10, HARSH),
        ("ours_resubmit", 10, HARSH),
        ("rollmux_paper", 24, HARSH),
    ],
    ids=str,
)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    arm, count, disruptions = request.param
    jobs = w1(5, jobs=count, drift=Drift.MIXED, wide_ratio=0.1)
    world = World(sync_s=20.0) if disruptions is SYNCED else PAPER_WORLD
    run = run_arm(ARMS[arm], jobs, seed=5, record=True, world=world, disruptions=disruptions)
    if disruptions is HARSH:
        assert min(run.counts.failures, run.counts.restarts, run.counts.given_up) > 0
    path = tmp_path_factory.mktemp("events") / "events.jsonl"
    write_events(run.ledger, path)
    return jobs, run, [json.loads(line) for line in path.read_text().splitlines()]


def test_node_times_times_prices_are_the_dollars(told: Told) -> None:
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
    assert dollars == pytest.approx(run.ledger.dollars)


def test_arrivals_phases_and_ends_give_the_kept_promises(told: Told) -> None:
    jobs, run, events = told
    arrived = {event["job"]: event for event in events if event["type"] == "arrival"}
    ended = {event["job"]: event["t"] for event in events if event["type"] == "job_done"}
    alone = _solo_s(events)
    kept = 0
    for job, ended_s in ended.items():
        arrival = arrived[job]
        assert alone[job][1] == arrival["iterations"]
        solo_s = arrival["cold_start_s"] + alone[job][0]
        kept += ended_s - arrival["t"] <= arrival["slo"] * solo_s + 1e-3
    assert len(ended) == len(jobs) - run.counts.given_up
    world = _world(events)
    assert kept == arm_result(jobs, run, world).kept
    for one in jobs:
        if one.job.job in ended:
            assert alone[one.job.job][0] == pytest.approx(float(one.iterations_s(world).sum()))


def _world(events: Events) -> World:
    syncs = any(event.get("phase") == "sync" for event in events)
    return World(sync_s=20.0) if syncs else PAPER_WORLD


def _solo_s(events: Events) -> dict[str, tuple[float, int]]:
    """Per job: the solo duration of its iterations, in s, and their number.

    A rollout without its training was lost with its iteration. Wide phases end once on each node.
    """
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    rollout_s: dict[str, float] = {}
    for event in events:
        job = event.get("job")
        if event["type"] == "left":
            rollout_s.pop(job, None)
        elif event["type"] == "phase_end" and event["phase"] == "rollout":
            rollout_s[job] = event["solo_s"]
        elif event["type"] == "phase_end" and event["phase"] == "sync":
            solo_s, count = found[job]
            found[job] = solo_s + event["solo_s"], count
        elif event["type"] == "phase_end" and job in rollout_s:
            solo_s, count = found[job]
            found[job] = solo_s + rollout_s.pop(job) + event["solo_s"], count + 1
    return found


def test_no_node_ever_holds_more_than_its_memory(told: Told) -> None:
    _, _, events = told
    size = {event["job"]: event["host_bytes"] for event in events if event["type"] == "arrival"}
    limit = {event["node"]: event["host_bytes"] for event in events if event["type"] == "node_up"}
    resident: dict[str, set[str]] = defaultdict(set)
    most = 0
    for event in events:
        if event["type"] in ("loading", "left", "job_done", "job_given_up"):
            for inside in resident.values():
                inside.discard(event["job"])
        if event["type"] == "loading":
            for node in event["nodes"]:
                resident[node].add(event["job"])
                assert sum(size[job] for job in resident[node]) <= limit[node]
                most = max(most, len(resident[node]))
    assert most > 1


def test_no_accelerator_is_held_twice(told: Told) -> None:
    """A holder that begins beside a tail has the rest, and the whole node when the tail ends."""
    _, _, events = told
    held: dict[str, dict[str, set[int]]] = defaultdict(dict)
    shared = 0
    for event in events:
        if "node" not in event or "job" not in event:
            continue
        parts, job = held[event["node"]], event["job"]
        if event["type"] in ("phase_start", "tail_moved"):
            parts[job] = set(event.get("accelerators", range(8)))
            assert len(set().union(*parts.values())) == sum(map(len, parts.values()))
            shared += len(parts) > 1
        elif event["type"] in ("phase_end", "phase_lost"):
            parts.pop(job, None)
            parts.update({other: set(range(8)) for other in parts if 0 not in parts[other]})
    assert shared > 0


def test_no_permit_is_held_twice_and_only_resident_jobs_run(told: Told) -> None:
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
        elif node is None:
            continue
        elif event["type"] == "phase_start":
            assert node in up
            assert holder.setdefault(node, job) == job
        elif event["type"] == "tail_moved":
            assert holder.pop(node) == job
            assert tails.setdefault(node, job) == job
        elif event["type"] in ("phase_end", "phase_lost"):
            if holder.get(node) == job:
                del holder[node]
            else:
                assert tails.pop(node) == job


def test_every_job_ran_all_of_its_phases_and_none_faster_than_alone(told: Told) -> None:
    """A stopped job begins its iteration again: its work on that iteration does not count."""
    jobs, _, events = told
    began: dict[tuple[str, str], float] = {}
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event["type"] == "left":
            job = event["job"]
            del spent[job, "rollout"][len(spent[job, "training"]) :]
            began = {key: t_s for key, t_s in began.items() if key[0] != job}
        if event["type"] not in ("phase_start", "phase_end"):
            continue
        key = (event["job"], event["phase"])
        if event["type"] == "phase_start":
            began.setdefault(key, event["t"])
        elif key in began:
            spent[key].append(event["t"] - began.pop(key))
    given_up = {event["job"] for event in events if event["type"] == "job_given_up"}
    for one in jobs:
        for column, phase in enumerate(("rollout", "training")):
            lengths_s = one.lengths_s[:, column]
            found = spent[one.job.job, phase]
            assert len(found) == len(lengths_s) or one.job.job in given_up
            assert all(a >= b - 1e-3 for a, b in zip(found, lengths_s, strict=False))


def test_nothing_happens_on_a_node_after_it_failed(told: Told) -> None:
    _, _, events = told
    failed: dict[str, float] = {}
    for event in events:
        if event["type"] == "node_failed":
            failed[event["node"]] = event["t"]
        elif event["type"] == "node_repaired":
            del failed[event["node"]]
        elif event["type"] in ("loading", "placement", "move", "restart"):
            assert not {*event["nodes"]} & {*failed}
        elif event["type"] in ("phase_lost", "node_down"):
            assert event["t"] <= failed.get(event["node"], event["t"])
        else:
            assert event.get("node") not in failed


@pytest.mark.parametrize("arm", sorted(ARMS))
def test_the_same_seed_gives_the_same_events(arm: str) -> None:
    jobs = w1(8, jobs=6)
    first, second = (
        run_arm(ARMS[arm], jobs, seed=8, record=True, disruptions=HARSH).ledger.events
        for _ in range(2)
    )
    assert first == second


def test_the_same_seed_gives_the_same_events_under_every_hash_seed() -> None:
    assert len({events_digest(hash_seed=seed, jobs=6) for seed in (0, 1, 4242)}) == 1
