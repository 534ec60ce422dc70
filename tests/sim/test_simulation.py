"""The event core and the small fleet: deterministic, and better with leases than without."""

import os
import subprocess
import sys

import pytest

from tests.sim.simulated_fleet import BatchShape, FleetShape, run_steps
from tests.sim.simulation import Simulation

BATCH = BatchShape(trajectories=96)


def test_runs_actions_in_time_order_and_ties_in_the_order_of_scheduling() -> None:
    sim, seen = Simulation(seed=1), []
    sim.at(2.0, lambda: seen.append("late"))
    sim.at(1.0, lambda: seen.append("first"))
    sim.at(1.0, lambda: sim.after(0.0, lambda: seen.append("third")))
    sim.at(1.0, lambda: seen.append("second"))
    sim.at(1.5, lambda: seen.append("never")).cancel()
    sim.run(until_s=1.7)
    assert (seen, sim.now) == (["first", "second", "third"], 1.7)
    sim.run()
    assert seen[-1] == "late"
    with pytest.raises(ValueError, match="cannot schedule"):
        sim.at(1.0, lambda: None)


def test_the_same_seed_gives_the_same_run_under_any_hash_seed() -> None:
    program = (
        "from tests.sim.simulated_fleet import *\n"
        "print(run_steps(FleetShape(guests=2, lease_s=0.5), BatchShape(trajectories=48), "
        "steps=2, seed=3, leases=True))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert len(said) == 1
    assert "rollout_s" in said.pop()


def test_every_trajectory_ends_though_leases_are_revoked_all_the_time() -> None:
    shape = FleetShape(guests=3, lease_s=0.05, gap_s=0.02)
    churned = run_steps(shape, BATCH, steps=3, seed=5, leases=True)
    fixed = run_steps(shape, BATCH, steps=3, seed=5, leases=False)
    assert sum(step.migrated for step in churned) > 10
    assert [(step.turns, step.tokens) for step in churned] == [
        (step.turns, step.tokens) for step in fixed
    ]


def _speedup(guest_speed_ratio: float) -> float:
    """Speedup of the steps after the first, in which the guest's speed is learned."""
    shape = FleetShape(guests=1, guest_speed_ratio=guest_speed_ratio, lease_s=1e6)
    fixed_s, leased_s = (
        sum(step.rollout_s for step in run_steps(shape, BATCH, steps=20, seed=5, leases=leases)[1:])
        for leases in (False, True)
    )
    return fixed_s / leased_s


def test_steady_leases_shorten_the_rollout_phase() -> None:
    assert 1.1 < _speedup(0.5) < 1.5
    assert _speedup(1.0) > 1.3


def test_a_very_slow_guest_costs_the_rollout_phase_little() -> None:
    assert _speedup(0.05) > 0.9
