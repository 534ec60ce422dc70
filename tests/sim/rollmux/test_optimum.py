"""The exact optimum of a few jobs: nothing that its own judgement allows is cheaper."""

from dataclasses import replace
from itertools import product

import pytest

from benchmarks.rollmux import optimum as benchmark
from benchmarks.rollmux.arms import ARMS
from benchmarks.rollmux.optimal_hosting import KnownJob, Optimum, PinnedPlanner
from benchmarks.rollmux.optimum import (
    HostingComparison,
    Lived,
    compared,
    instance_jobs,
    optimum_figures,
)
from benchmarks.rollmux.pieces import Pieces
from harvester.contracts.errors import ConfigError
from scheduler.model import Pool
from scheduler.rollmux.forecast.scenarios import Horizon
from scheduler.rollmux.planner.verdicts import Hosting
from scheduler.sim.rollmux.arms import arm_result, run_arm
from scheduler.sim.rollmux.workload import NODE_TYPES, SimulatedJob, w1

LONGER = Horizon(scenarios=2, cycles=200.0)
LIVED = Lived(per_hour=100.0, kept=6, worst_window=1.0)


def _some(count: int, *, seed: int = 7) -> list[SimulatedJob]:
    return w1(seed, jobs=count)


def _price(hosting: Hosting) -> float:
    return sum(
        max(masks).bit_length() * NODE_TYPES[pool].price_per_hour
        for pool, masks in ((Pool.ROLLOUT, hosting.rollout), (Pool.TRAINING, hosting.training))
    )


@pytest.mark.parametrize("seed", range(4))
def test_no_group_that_is_allowed_is_cheaper_than_what_the_search_finds(seed: int) -> None:
    """Three jobs in every way there is: own groups, a pair beside the third, all in one group."""
    optimum = Optimum([KnownJob.of(one) for one in _some(3, seed=seed)])
    found_per_hour, hostings = optimum.cheapest()
    assert sorted(member for one in hostings for member in one.members) == [0, 1, 2]
    assert sum(map(_price, hostings)) == pytest.approx(found_per_hour)
    assert all(optimum.admits(one) for one in hostings)

    def cheapest(members: tuple[int, ...]) -> float:
        masks = list(product([1, 2, 4], repeat=len(members)))
        groups = [Hosting(members, left, right) for left in masks for right in masks]
        return min((_price(one) for one in groups if optimum.admits(one)), default=float("inf"))

    alone = [cheapest((at,)) for at in range(3)]
    pairs = [
        cheapest(tuple(at for at in range(3) if at != left)) + alone[left] for left in range(3)
    ]
    assert found_per_hour == pytest.approx(min(sum(alone), *pairs, cheapest((0, 1, 2))))


def test_eight_cycles_allow_a_group_that_breaks_an_slo_over_hundreds() -> None:
    known = [KnownJob.of(one) for one in instance_jobs(109)]
    brief, long = Optimum(known, horizon=Horizon(scenarios=2)), Optimum(known)
    (price, hostings), (long_price, long_hostings) = brief.cheapest(), long.cheapest()
    assert price < long_price
    assert not all(long.admits(one) for one in hostings)
    assert all(Optimum(known, horizon=LONGER).admits(one) for one in long_hostings)


def test_jobs_stay_where_the_hosting_has_them() -> None:
    jobs = _brief_jobs()
    _, hostings = Optimum([KnownJob.of(one) for one in jobs]).cheapest()
    run = run_arm(ARMS["optimum"], jobs, seed=0, record=True)
    assert run.counts.moves == 0
    placed = {
        event["job"]: tuple(event["nodes"])
        for event in run.ledger.events
        if event["type"] == "placement"
    }
    for hosting in hostings:
        nodes = {node for member in hosting.members for node in placed[jobs[member].job.job]}
        used = max(hosting.rollout).bit_length() + max(hosting.training).bit_length()
        assert len(nodes) == used
    assert arm_result(jobs, run).jobs == len(jobs)
    assert PinnedPlanner(jobs, hostings).choose(jobs[0].job.job).delta_per_hour > 0.0


def _brief_jobs() -> list[SimulatedJob]:
    return [replace(one, arrival_s=0.0, lengths_s=one.lengths_s[:20]) for one in _some(5)]


def test_the_optimum_of_many_jobs_is_refused() -> None:
    with pytest.raises(ConfigError, match="not 20"):
        run_arm(ARMS["optimum"], _some(20), seed=0)


def test_an_instance_says_what_both_hostings_cost_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "LIVED_S", 12 * 3600.0)
    monkeypatch.setattr(benchmark, "PRICED_S", (4 * 3600.0, 10 * 3600.0))
    found = compared(103)
    assert found.jobs >= 6
    assert 0 <= found.found_lived.kept <= found.jobs
    assert found.found_lived.per_hour == pytest.approx(found.found_per_hour)
    assert found.ratio == found.ours_per_hour / found.found_per_hour


class _Kept(Pieces):
    def __init__(self, found: HostingComparison) -> None:
        super().__init__(None)
        self._found = found

    def kept(self, name: str, run: object, kind: type) -> HostingComparison:  # type: ignore[override]
        del name, run, kind
        return self._found


@pytest.mark.parametrize("admitted", [True, False])
def test_ours_below_the_search_is_reported_or_shows_that_the_search_is_wrong(
    admitted: bool,
) -> None:
    below = HostingComparison(
        jobs=6,
        ours_per_hour=90.0,
        found_per_hour=100.0,
        ours_admitted=admitted,
        ours_lived=LIVED,
        found_lived=LIVED,
    )
    if admitted:
        with pytest.raises(AssertionError, match="missed a hosting"):
            optimum_figures(1, _Kept(below))
        return
    found = optimum_figures(1, _Kept(below))["ours_over_optimum"]
    assert (found["mean"], found["ours_below_search"]) == (0.9, 1)
