"""Mixes of jobs: W2 has wide jobs, W3 matches its page."""

import numpy as np
import pytest

from benchmarks.rollmux.mixes import TIGHT_SLO, Mix
from harvester.contracts.errors import ConfigError
from scheduler.rollmux.beliefs.tail import best_shape
from scheduler.sim.rollmux.workload import Drift, SimulatedJob, w1
from tests.sim.rollmux.drawn_jobs import as_numbers


@pytest.fixture(scope="module")
def jobs() -> list[SimulatedJob]:
    return [one for seed in range(5) for one in Mix.W3.drawn(seed)]


def test_a_seed_is_one_mix_of_jobs() -> None:
    assert as_numbers(Mix.W3.drawn(3)) == as_numbers(Mix.W3.drawn(3))
    assert as_numbers(Mix.W3.drawn(3)) != as_numbers(Mix.W3.drawn(4))
    assert as_numbers(Mix.W1.drawn(3)) == as_numbers(w1(3))
    wide = [one for one in Mix.W2.drawn(3) if one.job.phases[0].nodes == 2]
    assert 10 <= len(wide) <= 30
    assert all(one.job.phases[1].nodes == 2 for one in wide)


def test_arrivals_come_in_bursts() -> None:
    gaps_s = np.diff([one.arrival_s for one in Mix.W3.drawn(0)])
    assert (gaps_s >= 0.0).all()
    assert np.median(gaps_s) < 0.15 * gaps_s.mean()


def test_a_third_is_promised_almost_its_time_alone(jobs: list[SimulatedJob]) -> None:
    tight = [one for one in jobs if one.job.slo <= TIGHT_SLO[1]]
    assert len(tight) / len(jobs) == pytest.approx(1 / 3, abs=0.05)


def test_more_jobs_are_training_heavy_than_balanced(jobs: list[SimulatedJob]) -> None:
    ratios = np.array([one.means_s[0] / one.means_s[1] for one in jobs])
    assert (ratios < 0.7).mean() == pytest.approx(0.4, abs=0.05)
    assert ((ratios > 0.7) & (ratios < 1.5)).mean() == pytest.approx(0.25, abs=0.05)


def test_agentic_rollouts_vary_and_end_in_long_tails(jobs: list[SimulatedJob]) -> None:
    long = [one for one in jobs if one.iterations >= 30]
    spread = np.array([one.lengths_s[:, 0].std() / one.means_s[0] for one in long])
    freed = np.array([best_shape(one.curve, accelerators=8).node_ratio for one in long])
    agentic = spread > 0.13
    assert agentic.mean() == pytest.approx(0.5, abs=0.08)
    assert freed[agentic].max() < freed[~agentic].mean()


def test_no_phase_is_longer_than_declared(jobs: list[SimulatedJob]) -> None:
    for one in jobs:
        maxima_s = np.array([phase.max_s for phase in one.job.phases])
        assert (one.lengths_s <= maxima_s + 1e-9).all()


def test_a_drift_of_w3_is_refused() -> None:
    with pytest.raises(ConfigError, match="W3"):
        Mix.W3.drawn(0, drift=Drift.MIXED)
