"""Upper bound of the value of leases to an ideal planner: the cheapest mix of groups.

Six jobs, their true means, no variation, moves free and as often as wanted: a linear program over
all groups of up to four of them says how long each group should last so that every job gets its
hour of solo work within its SLO at the least price. No planner with these groups and this order of
phases does it for less. Steady headroom, no price for leases, and every bulk has all slots of its
group to itself.
"""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any, Final

import msgspec
import numpy as np
from scipy.optimize import linprog

from benchmarks.rollmux.headroom import HARVESTED_RATIO
from benchmarks.rollmux.lease_supply import SLOTS_RATIO
from benchmarks.rollmux.optimal_hosting import KnownJob
from benchmarks.rollmux.pieces import Pieces
from benchmarks.testbed.calibration import TARGET_BUSY_SHARE
from scheduler.model import Completion
from scheduler.rollmux.beliefs.tail import TailShape, best_shape
from scheduler.rollmux.forecast.compiled import Records
from scheduler.rollmux.forecast.execution import advance
from scheduler.rollmux.forecast.forecast import Roster
from scheduler.rollmux.forecast.judge import OUR_RULES
from scheduler.rollmux.forecast.stages import EVENT, empty_nodes, empty_permits
from scheduler.rollmux.planner.cheapest_hosting import CheapestHosting, SearchedJob
from scheduler.sim.rollmux.workload import (
    H20_PER_HOUR,
    H800_PER_HOUR,
    NODE_TYPES,
    SimulatedJob,
    w1,
)

HEADROOMS: Final = (round(HARVESTED_RATIO * (1.0 - TARGET_BUSY_SHARE), 3), 0.75, 1.0)
"""The first is what the harvest part's pools lend in the mean."""
INSTANCES: Final = 10
JOBS: Final = 6
GROUP_JOBS: Final = 4
TAIL: Final = best_shape((Completion(0.5, 0.8),), accelerators=8)
_WARM_UP, _CYCLES = 4.0, 24.0
"""Warm-up and cycles of a forecast, in solo iterations of the longest job."""
_NO_LOG = np.zeros(0, dtype=EVENT)


class CheapestMix(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars of the cheapest mix, every job an hour of solo work."""

    without: float
    leased: tuple[float, ...]
    """Dollars with leases, at each of HEADROOMS."""


def busy_bound(headroom: float, jobs: Sequence[SimulatedJob], *, tail: TailShape = TAIL) -> float:
    """Cost without leases over cost with them if no node were ever idle, by prices alone.

    Slots then take their share of every bulk that runs at home.
    """
    rollout, training, bulk = 0.0, 0.0, 0.0
    for one in jobs:
        rollout_s, training_s = one.means_s
        iteration_s = rollout_s + training_s
        rollout += rollout_s / iteration_s * tail.node_ratio
        bulk += rollout_s / iteration_s * tail.bulk_ratio
        training += training_s / iteration_s
    spared = bulk * (1.0 - 1.0 / (1.0 + SLOTS_RATIO * headroom))
    without = rollout * H20_PER_HOUR + training * H800_PER_HOUR
    return without / (without - spared * H20_PER_HOUR)


def cheapest_mix(jobs: Sequence[SimulatedJob], *, headroom: float = 0.0) -> float:
    """Dollars for an hour of solo work of every job, over all groups and orders of groups."""
    roster = Roster.of([KnownJob.of(one).as_occupant() for one in jobs])
    prices: list[float] = []
    columns: list[Records] = []
    for price, members, rollout, training in _hostings(jobs):
        prices.append(price)
        column = np.zeros(2 * len(jobs))
        speeds = _speeds(roster.hosted(members, rollout, training), headroom)
        for place, speed in zip(members, speeds, strict=True):
            column[place], column[len(jobs) + place] = -speed, 1.0
        columns.append(column)
    slos = np.array([one.job.slo for one in jobs])
    limits = np.concatenate([-np.ones(len(jobs)), slos])
    found = linprog(prices, A_ub=np.stack(columns, axis=1), b_ub=limits, method="highs")
    if not found.success:
        raise AssertionError(f"every job can be alone: {found.message}")
    return float(found.fun)


def _hostings(
    jobs: Sequence[SimulatedJob],
) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Price an hour, members and their nodes of every group that host memory allows."""
    search = CheapestHosting(NODE_TYPES, GROUP_JOBS)
    candidates = [SearchedJob(at, one.job.host_bytes, (0.0, 0.0)) for at, one in enumerate(jobs)]
    fits = search.fitting(candidates)
    for size in range(1, GROUP_JOBS + 1):
        for members in combinations(range(len(jobs)), size):
            for price, rollout, training in search.priced(
                candidates, members, (0.0, float("inf")), fits
            ):
                yield price, members, rollout, training


def _speeds(roster: Roster, headroom: float) -> Records:
    """Solo seconds that every job gets done in a second."""
    jobs = roster.jobs.copy()
    jobs["offset"], jobs["length"] = np.arange(jobs.size), 1
    solo_s = roster.beliefs[:, :, 0]
    lengths_s = np.array(solo_s, order="C")
    lengths_s[:, 0] = _spill(jobs, solo_s[:, 0], headroom)
    longest_s = float(solo_s.sum(axis=1).max())
    settled_s, until_s = _WARM_UP * longest_s, (_WARM_UP + _CYCLES) * longest_s
    state = (jobs, empty_nodes(), empty_permits(), lengths_s, OUR_RULES)
    advance(*state, 0.0, settled_s, _NO_LOG)
    before_s = jobs["solo_s"] + jobs["worked_s"]
    advance(*state, settled_s, until_s, _NO_LOG)
    worked_s = jobs["solo_s"] + jobs["worked_s"] - before_s
    speedup = solo_s.sum(axis=1) / lengths_s.sum(axis=1)
    return np.asarray(speedup * worked_s / (until_s - settled_s))


def _spill(jobs: Records, rollout_s: Records, headroom: float) -> Records:
    """Rollout times with the bulks on all slots of the group; changes `jobs` to these bulks."""
    nodes = [int(mask).bit_count() for mask in jobs["rollout_nodes"]]
    group = int(np.bitwise_or.reduce(jobs["rollout_nodes"])).bit_count()
    bulk_s = (
        rollout_s * jobs["bulk_ratio"] / (1.0 + headroom * SLOTS_RATIO * group / np.array(nodes))
    )
    taken_s = bulk_s + rollout_s * (1.0 - jobs["bulk_ratio"])
    jobs["bulk_ratio"] = bulk_s / taken_s
    return np.asarray(taken_s)


def drawn(instance: int) -> list[SimulatedJob]:
    rng = np.random.Generator(np.random.PCG64([11, instance]))
    jobs = w1(20_000 + instance, jobs=40)
    return [jobs[int(at)] for at in rng.choice(len(jobs), JOBS, replace=False)]


def mix_of(instance: int) -> CheapestMix:
    jobs = drawn(instance)
    return CheapestMix(
        without=cheapest_mix(jobs),
        leased=tuple(cheapest_mix(jobs, headroom=headroom) for headroom in HEADROOMS),
    )


def bound_figures(instances: int, pieces: Pieces) -> dict[str, Any]:
    """Cost without leases over cost with them, free, by headroom."""
    at_headrooms = "-".join(f"{headroom:g}" for headroom in HEADROOMS)
    mixes = [
        pieces.kept(f"bound-{at}-at-{at_headrooms}", partial(mix_of, at), CheapestMix)
        for at in range(instances)
    ]
    workload = w1(0)
    return {
        "harvest_bound": {
            "instances": instances,
            "headroom": list(HEADROOMS),
            "busy": [busy_bound(headroom, workload) for headroom in HEADROOMS],
            "mix": [
                statistics.mean(one.without / one.leased[at] for one in mixes)
                for at in range(len(HEADROOMS))
            ],
            "mix_max": [
                max(one.without / one.leased[at] for one in mixes) for at in range(len(HEADROOMS))
            ],
        }
    }
