"""Value of leased serving capacity: our planner with it over our planner without.

Every seed is run three times: without leases, with them, and with all of them revoked for good at
a moment in the middle, when jobs are placed and slots are in use. Leases give our planner time:
phases end sooner, jobs leave sooner, nodes go down sooner. No admission, move or SLO rests on them.
"""

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.rollmux.headroom import Headroom, headroom_of
from benchmarks.rollmux.lease_supply import NEVER, LeaseSupply
from benchmarks.rollmux.leased_driver import LeasedDriver
from benchmarks.rollmux.pieces import ArmOfSeed, Pieces
from benchmarks.testbed.bursts import Bursts, generated_trace
from benchmarks.testbed.trace import read_trace
from scheduler.model import Pool
from scheduler.sim.rollmux.arms import (
    ARMS,
    SLO_COUNTS_QUEUEING,
    ArmResult,
    arm_result,
    run_arm,
    runtime_of,
)
from scheduler.sim.rollmux.disruptions import UNDISTURBED, Disruptions
from scheduler.sim.rollmux.ledger import Ledger, RunResult
from scheduler.sim.rollmux.workload import JOBS, NODE_TYPES, SPAN_S, SimulatedJob, w1

LEASE_PRICE_RATIO = 0.3
_GENERATED_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestResult:
    run: RunResult
    slot_hours: float
    """Leased, activation and waiting for weights included."""
    given_node_hours: float
    """Work that leased slots did, in hours of a rollout node."""

    def dollars(self, *, slot_price_per_hour: float) -> float:
        return self.run.ledger.dollars + self.slot_hours * slot_price_per_hour


def run_harvest(
    jobs: list[SimulatedJob],
    supply: LeaseSupply,
    *,
    disruptions: Disruptions = UNDISTURBED,
    record: bool = False,
) -> HarvestResult:
    driver = LeasedDriver(
        jobs,
        runtime_of(ARMS["ours"], jobs, seed=0, harvesting=True),
        supply,
        disruptions=disruptions,
        ledger=Ledger(record=record),
    )
    return HarvestResult(
        run=driver.run(),
        slot_hours=driver.slot_s / 3600,
        given_node_hours=driver.given_node_s / 3600,
    )


class HarvestPiece(msgspec.Struct, frozen=True, kw_only=True):
    arm: ArmResult
    slot_hours: float
    given_node_hours: float

    def dollars(self, price_ratio: float) -> float:
        """Dollars with leased slots at this share of a rollout accelerator's price."""
        node = NODE_TYPES[Pool.ROLLOUT]
        slot_price = price_ratio * node.price_per_hour / node.accelerators
        return self.arm.dollars + slot_price * self.slot_hours


def harvest_figures(
    seeds: Sequence[int],
    pieces: Pieces,
    *,
    traces: Sequence[Path],
    busy_share: float,
    harvested_ratio: float,
    jobs: int,
) -> dict[str, Any]:
    """Figures over all seeds and traces; without a trace, over a bursty one of the project's own.

    `busy_share` is production's alone, `harvested_ratio` a guest's share of what that leaves.
    """
    given = [read_trace(path) for path in traces] or [
        generated_trace(Bursts(), duration_s=_GENERATED_S, seed=1)
    ]
    found = [
        _of_trace(
            seeds,
            pieces,
            headroom_of(one, busy_share=busy_share, harvested_ratio=harvested_ratio),
            jobs,
        )
        for one in given
    ]
    names = ("cost_ratio_lease_free", "cost_ratio_lease_30", "slo_attainment")
    means = {
        name: statistics.mean(one[name] for one in found)
        for name in (*names, "slo_attainment_all_revoked")
    }
    return {"harvest": means | {"seeds": len(seeds), "jobs": jobs, "traces": found}}


def _of_trace(
    seeds: Sequence[int], pieces: Pieces, headroom: Headroom, jobs: int
) -> dict[str, Any]:
    free: list[float] = []
    priced: list[float] = []
    harvested: list[HarvestPiece] = []
    revoked: list[ArmResult] = []
    for seed in seeds:
        without = _without(pieces, seed, jobs)
        middle = float(np.random.Generator(np.random.PCG64(seed)).uniform(0.3, 0.7))
        moment_s = middle * SPAN_S * jobs / JOBS
        one = _piece(pieces, headroom, seed, jobs, NEVER)
        harvested.append(one)
        revoked.append(_piece(pieces, headroom, seed, jobs, (moment_s,)).arm)
        free.append(without.dollars / one.dollars(0.0))
        priced.append(without.dollars / one.dollars(LEASE_PRICE_RATIO))
    total = sum(one.arm.jobs for one in harvested)
    return {
        "trace": headroom.trace,
        "trace_seconds_per_second": headroom.speed,
        "production_busy_share": headroom.busy_share,
        "harvested_of_idle": headroom.harvested_ratio,
        "headroom_mean": headroom.mean,
        "cost_ratio_lease_free": statistics.mean(free),
        "cost_ratio_lease_free_range": [min(free), max(free)],
        "cost_ratio_lease_30": statistics.mean(priced),
        "cost_ratio_lease_30_range": [min(priced), max(priced)],
        "slo_attainment": sum(one.arm.kept for one in harvested) / total,
        "slo_attainment_all_revoked": sum(one.kept for one in revoked) / total,
        "slo_counts_queueing": SLO_COUNTS_QUEUEING,
        "windows_kept": sum(one.arm.windows_kept for one in harvested) / total,
        "windows_above_goal": sum(one.arm.windows_above_goal for one in harvested),
        "moves_per_job": sum(one.arm.moves for one in harvested) / total,
        "slot_hours_per_job": sum(one.slot_hours for one in harvested) / total,
        "given_node_hours_per_job": sum(one.given_node_hours for one in harvested) / total,
    }


def _without(pieces: Pieces, seed: int, count: int) -> ArmResult:
    """Our planner with tail migration and no leases."""
    if count == JOBS:
        return pieces.arm(ArmOfSeed(name="ours", seed=seed)).arm

    def run() -> ArmResult:
        jobs = w1(seed, jobs=count)
        return arm_result(jobs, run_arm(ARMS["ours"], jobs, seed=seed))

    return pieces.kept(f"ours-{seed}-of-{count}", run, ArmResult)


def _piece(
    pieces: Pieces, headroom: Headroom, seed: int, count: int, turns_s: tuple[float, ...]
) -> HarvestPiece:
    def run() -> HarvestPiece:
        jobs = w1(seed, jobs=count)
        supply = LeaseSupply(given_s=headroom.given_s, turns_s=turns_s, seed=seed)
        found = run_harvest(jobs, supply)
        return HarvestPiece(
            arm=arm_result(jobs, found.run),
            slot_hours=found.slot_hours,
            given_node_hours=found.given_node_hours,
        )

    record = hashlib.sha256(headroom.given_s.tobytes()).hexdigest()[:12]
    until = f"-until-{turns_s[0]:.0f}" if turns_s else ""
    return pieces.kept(f"harvest-{record}-{seed}-of-{count}{until}", run, HarvestPiece)
