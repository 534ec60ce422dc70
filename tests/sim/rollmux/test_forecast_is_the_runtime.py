"""The compiled forecast and the shipped runtime, on the same draws: the same phases and times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.rollmux.optimal_hosting import PinnedPlanner
from harvester.contracts.ids import JobId, NodeId, TenantId
from scheduler.model import JobSpec, PhaseSpec, Pool
from scheduler.rollmux.cluster.config import ClusterConfig, PoolNodes
from scheduler.rollmux.cluster.runtime import PhaseRuntime, RuntimeConfig
from scheduler.rollmux.forecast.compiled import Records
from scheduler.rollmux.forecast.execution import advance
from scheduler.rollmux.forecast.forecast import Roster
from scheduler.rollmux.forecast.stages import (
    EVENT,
    ROLLOUT_ENDED,
    TAIL_MIGRATED,
    TRAINING_ENDED,
    Rules,
    empty_nodes,
    empty_permits,
)
from scheduler.rollmux.permits.terms import PermitsConfig
from scheduler.rollmux.planner.verdicts import Hosting
from scheduler.sim.rollmux.driver import Driver
from scheduler.sim.rollmux.ledger import Ledger
from scheduler.sim.rollmux.workload import NODE_TYPES, SimulatedJob, World, phases
from tests.unit.scheduler.rollmux.forecast.stage_jobs import occupant

ITERATIONS = 12
WORLD = World(cold_start_s=0.0, warm_start_s=5.0, migrate_s=0.0)
SYNCED = World(cold_start_s=0.0, warm_start_s=5.0, migrate_s=0.0, sync_s=7.3)
RULES = Rules(migrate=True, warm_s=5.0, migrate_s=0.0)
BULK_RATIO, TAIL_SHARE = 0.5, 0.25
"""Bulk ratio and tail share of the papers' curve, with a threshold of 0.8."""
APART_S = 1e-7
"""Gap between two arrivals, in s: the forecast's jobs are in an order, and wait from the
beginning."""
KINDS = {ROLLOUT_ENDED: "rollout", TRAINING_ENDED: "training"}

_job = st.tuples(
    st.floats(60.0, 500.0),
    st.floats(40.0, 400.0),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((True, True, False)),
)
Drawn = tuple[float, float, int, int, bool]
"""Means, nodes of each pool as masks, and whether the rollout can run on a part of a node."""


@settings(max_examples=40, deadline=None)
@given(
    st.lists(_job, min_size=2, max_size=4),
    st.integers(0, 10_000),
    st.sampled_from((WORLD, SYNCED)),
)
def test_phases_end_when_the_forecast_says(drawn: list[Drawn], seed: int, world: World) -> None:
    """One or two nodes of each pool; tails move, start beside each other and end."""
    jobs = _jobs(drawn, seed)
    rollout, training = (tuple(one[at] for one in drawn) for at in (2, 3))
    if max(rollout).bit_length() > 1 and not any(mask & 1 for mask in rollout):
        return
    lived, moved = _lived(jobs, rollout, training, world)
    forecast, migrated = _forecast(jobs, rollout, training, world)
    assert [each[1:] for each in lived] == [each[1:] for each in forecast[: len(lived)]]
    for (at_s, *_), (said_s, *_) in zip(lived, forecast, strict=False):
        assert at_s == pytest.approx(said_s, abs=1e-3)
    assert moved == migrated


def _jobs(drawn: list[Drawn], seed: int) -> list[SimulatedJob]:
    rng = np.random.Generator(np.random.PCG64(seed))
    return [
        SimulatedJob(
            job=JobSpec(
                job=JobId(f"j{at}"),
                tenant=TenantId("t"),
                phases=_phases(rollout.bit_count(), training.bit_count(), divisible=divisible),
                host_bytes=1,
                slo=50.0,
            ),
            arrival_s=at * APART_S,
            lengths_s=np.array([rollout_s, training_s]) * rng.uniform(0.8, 1.2, (ITERATIONS, 2)),
            means_s=(rollout_s, training_s),
        )
        for at, (rollout_s, training_s, rollout, training, divisible) in enumerate(drawn)
    ]


def _phases(rollout: int, training: int, *, divisible: bool) -> tuple[PhaseSpec, ...]:
    rolls, trains = phases(1e6, 1e6, rollout, training)
    return replace(rolls, divisible=divisible), trains


def _lived(
    jobs: list[SimulatedJob],
    rollout: tuple[int, ...],
    training: tuple[int, ...],
    world: World,
) -> tuple[list[tuple[float, str, str]], int]:
    """Ends of phases until the first job is done, and tails moved by then."""
    pools = {
        pool: PoolNodes(type=kind, names=tuple(NodeId(f"{pool}-{at}") for at in range(4)))
        for pool, kind in NODE_TYPES.items()
    }
    cluster = ClusterConfig(
        rollout=pools[Pool.ROLLOUT], training=pools[Pool.TRAINING], tail_ratio=0.8, gone_s=1e9
    )
    config = RuntimeConfig(permits=PermitsConfig(lease_s=1e9), cluster=cluster)
    hosting = Hosting(tuple(range(len(jobs))), rollout, training)
    ledger = Ledger(record=True)
    Driver(
        jobs, PhaseRuntime(config, PinnedPlanner(jobs, [hosting])), world=world, ledger=ledger
    ).run()
    events = ledger.in_order()
    # A job is done when its weights are synced, and the forecast's list ends with its training.
    until_s = next(each["t"] for each in events if each["type"] == "job_done") - world.sync_s
    ends: list[tuple[float, str, str]] = []
    moved: set[tuple[float, str]] = set()
    for each in events:
        if each["t"] > until_s - 10.0:
            break
        end = (each["t"], each.get("job", ""), str(each.get("phase", "")))
        if each["type"] == "phase_end" and end[2] != "sync" and end not in ends[-2:]:
            ends.append(end)
        elif each["type"] == "tail_moved":
            moved.add((each["t"], each["job"]))
    return ends, len([one for one in moved if one[0] < ends[-1][0] - 5.0])


def _forecast(
    jobs: list[SimulatedJob],
    rollout: tuple[int, ...],
    training: tuple[int, ...],
    world: World,
) -> tuple[list[tuple[float, str, str]], int]:
    first = max(rollout).bit_length()
    members = [
        occupant(*one.means_s, rollout=rollout[at], training=training[at] << first)
        for at, one in enumerate(jobs)
    ]
    records = Roster.of(members).jobs
    divisible = np.array([one.job.phases[0].divisible for one in jobs])
    records["bulk_ratio"] = np.where(divisible, BULK_RATIO, 1.0)
    records["tail_share"] = np.where(divisible, TAIL_SHARE, 0.0)
    records["divisible"], records["sync_s"] = divisible, world.sync_s
    records["offset"] = np.arange(len(jobs)) * ITERATIONS
    records["length"] = ITERATIONS
    log = np.zeros(8192, dtype=EVENT)
    _, logged, _ = advance(
        records,
        empty_nodes(),
        empty_permits(),
        np.concatenate([one.lengths_s for one in jobs]),
        RULES,
        0.0,
        sum(float(one.iterations_s(world).sum()) for one in jobs) + 1e4,
        log,
    )
    events = log[:logged]
    done_s = min(_trained(events, at, ITERATIONS) for at in range(len(jobs)))
    ends = [
        (float(each["t_s"]), f"j{each['job']}", KINDS[int(each["kind"])])
        for each in events
        if each["kind"] in KINDS and each["t_s"] <= done_s - 10.0
    ]
    migrated = events[(events["kind"] == TAIL_MIGRATED) & (events["t_s"] < ends[-1][0] - 5.0)]
    return ends, len(migrated)


def _trained(events: Records, job: int, times: int) -> float:
    """Time of the `times`-th end of the job's training, in s."""
    ended = (events["kind"] == TRAINING_ENDED) & (events["job"] == job)
    return float(events["t_s"][ended][times - 1])
