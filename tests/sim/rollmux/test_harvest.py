"""The harvest arm: leases change how long things take, and nothing that was promised."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from msgspec import structs

from benchmarks.rollmux.harvest import HarvestResult, run_harvest
from benchmarks.rollmux.lease_supply import LeaseSupply
from scheduler.model import PhaseSpec
from scheduler.sim.rollmux.arms import ARMS, arm_result, run_arm
from scheduler.sim.rollmux.disruptions import Disruptions
from scheduler.sim.rollmux.ledger import RunResult
from scheduler.sim.rollmux.workload import NODE_TYPES, SimulatedJob, w1

_RNG = np.random.Generator(np.random.PCG64(3))
UNEVEN = np.concatenate([[0.0], np.cumsum(_RNG.uniform(0.1, 1.0, 3000))])
OFTEN = tuple(accumulate(float(stay_s) for stay_s in _RNG.exponential(900.0, 2000)))


@pytest.fixture(scope="module")
def jobs() -> list[SimulatedJob]:
    return w1(5, jobs=12, wide_ratio=0.1)


@pytest.fixture(scope="module")
def often_revoked(jobs: list[SimulatedJob]) -> HarvestResult:
    return run_harvest(jobs, LeaseSupply(given_s=UNEVEN, turns_s=OFTEN), record=True)


@pytest.fixture(scope="module")
def without(jobs: list[SimulatedJob]) -> RunResult:
    return run_arm(ARMS["ours"], jobs, seed=5, record=True)


@pytest.mark.parametrize(
    "supply",
    [LeaseSupply(given_s=UNEVEN, turns_s=(0.0,)), LeaseSupply(given_s=UNEVEN, slots_ratio=0.0)],
    ids=["revoked before anything began", "no slots"],
)
def test_without_leases_in_force_the_run_equals_the_planner_s_without_leases(
    jobs: list[SimulatedJob], without: RunResult, supply: LeaseSupply
) -> None:
    revoked = run_harvest(jobs, supply, record=True)
    assert revoked.run.ledger.events == without.ledger.events
    assert revoked.run.ledger.dollars == without.ledger.dollars
    assert arm_result(jobs, revoked.run) == arm_result(jobs, without)
    assert revoked.slot_hours == 0.0


def test_leases_do_work_and_cost_what_they_were_held(
    jobs: list[SimulatedJob], often_revoked: HarvestResult
) -> None:
    assert often_revoked.given_node_hours > 0.0
    nodes = often_revoked.given_node_hours * NODE_TYPES[next(iter(NODE_TYPES))].accelerators
    assert nodes < often_revoked.slot_hours
    dearer = often_revoked.dollars(slot_price_per_hour=0.5)
    assert dearer == pytest.approx(
        often_revoked.run.ledger.dollars + 0.5 * often_revoked.slot_hours
    )


def test_every_promise_is_kept_while_leases_come_and_go(
    jobs: list[SimulatedJob], often_revoked: HarvestResult
) -> None:
    assert arm_result(jobs, often_revoked.run).kept == len(jobs)


@pytest.fixture(scope="module")
def undivided(jobs: list[SimulatedJob]) -> list[SimulatedJob]:
    """The same jobs with tails that keep all of their nodes or none."""
    return [
        replace(one, job=structs.replace(one.job, phases=_undivided(one.job.phases)))
        for one in jobs
    ]


def _undivided(phases: tuple[PhaseSpec, ...]) -> tuple[PhaseSpec, ...]:
    return tuple(structs.replace(phase, divisible=False) for phase in phases)


@pytest.fixture(scope="module")
def away(undivided: list[SimulatedJob]) -> HarvestResult:
    return run_harvest(undivided, LeaseSupply(given_s=UNEVEN, turns_s=OFTEN), record=True)


@pytest.fixture(scope="module")
def failing(undivided: list[SimulatedJob]) -> HarvestResult:
    harsh = Disruptions(seed=4, node_mtbf_s=5 * 3600.0, leaving_ratio=0.2)
    supply = LeaseSupply(given_s=UNEVEN, turns_s=OFTEN)
    return run_harvest(undivided, supply, disruptions=harsh, record=True)


@pytest.mark.parametrize("run", ["often_revoked", "away", "failing"])
def test_memory_and_permits_hold_while_leases_come_and_go(
    jobs: list[SimulatedJob], run: str, request: pytest.FixtureRequest
) -> None:
    found: HarvestResult = request.getfixturevalue(run)
    size = {one.job.job: one.job.host_bytes for one in jobs}
    limit = next(iter(NODE_TYPES.values())).host_bytes
    resident: dict[str, set[str]] = defaultdict(set)
    holder: dict[str, str] = {}
    tails: dict[str, str] = {}
    away: set[tuple[str, str]] = set()
    for event in found.run.ledger.in_order():
        kind, job, node = event["type"], event.get("job", ""), event.get("node", "")
        if kind == "loading":
            for one in event["nodes"]:
                resident[one].add(job)
                # The ledger does not record the state loaded beside a phase that outlives a node.
                if not found.run.counts.failures:
                    assert sum(size[each] for each in resident[one]) <= limit
        elif kind in ("left", "job_done", "job_given_up"):
            for inside in resident.values():
                inside.discard(job)
        elif kind == "phase_start":
            assert holder.setdefault(node, job) == job
        elif kind == "tail_moved":
            assert holder.pop(node) == job
            assert tails.setdefault(node, job) == job
        elif kind == "tail_leased":
            assert holder.pop(node) == job
            away.add((node, job))
        elif kind == "tail_returned":
            away = {each for each in away if each[1] != job}
            assert holder.setdefault(node, job) == job
        elif kind in ("phase_end", "phase_lost"):
            if (node, job) in away:
                away.remove((node, job))
                assert holder.get(node) != job
            else:
                held = holder if holder.get(node) == job else tails
                assert held.pop(node) == job


def test_a_tail_that_keeps_no_node_ends_on_leases_or_comes_home_and_is_never_lost(
    away: HarvestResult,
) -> None:
    told = Counter(event["type"] for event in away.run.ledger.events)
    assert told["tail_leased"] > told["tail_returned"] > 0
    assert told["phase_lost"] == told["tail_moved"] == 0


def test_a_node_that_fails_takes_no_tail_that_is_out_on_leases(
    jobs: list[SimulatedJob], failing: HarvestResult
) -> None:
    """With two nodes, a tail in line may get one back before it goes home, and lose it."""
    narrow = {one.job.job for one in jobs if one.job.phases[0].nodes == 1}
    counts = failing.run.counts
    assert min(counts.failures, counts.restarts, counts.given_up) > 0
    events = failing.run.ledger.in_order()
    given_up = {(event["t"], event["job"]) for event in events if event["type"] == "job_given_up"}
    out: dict[str, set[str]] = defaultdict(set)
    outlived = 0
    for event in events:
        kind, job = event["type"], event.get("job", "")
        if kind == "tail_leased":
            out[job].add(event["node"])
        elif kind == "node_failed":
            outlived += any(event["node"] in out[job] for job in narrow & set(out))
        elif kind in ("tail_returned", "phase_end", "job_given_up", "left"):
            out.pop(job, None)
        elif kind == "phase_lost":
            assert job not in narrow & set(out) or (event["t"], job) in given_up
    assert outlived > 0


def test_the_same_seed_gives_the_same_events_with_leases(
    jobs: list[SimulatedJob], often_revoked: HarvestResult
) -> None:
    again = run_harvest(jobs, LeaseSupply(given_s=UNEVEN, turns_s=OFTEN), record=True)
    assert again.run.ledger.events == often_revoked.run.ledger.events
    assert again.slot_hours == often_revoked.slot_hours
