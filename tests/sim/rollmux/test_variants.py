"""Worlds that break one assumption each: only the named part differs, and it does differ."""

import numpy as np
import pytest

from benchmarks.rollmux.variants import (
    AS_PUBLISHED,
    AUTOCORRELATION,
    NO_TAIL,
    STRAGGLER_FACTOR,
    VARIANTS,
    lognormal_curve,
)
from scheduler.rollmux.beliefs.tail import UNDIVIDED, best_shape
from scheduler.sim.rollmux.arms import ARMS, arm_result, run_arm
from scheduler.sim.rollmux.workload import PHASE_CV, SimulatedJob, World, w1
from tests.sim.rollmux.drawn_jobs import as_numbers


@pytest.fixture(scope="module")
def jobs() -> list[SimulatedJob]:
    return w1(5)


def _of(variant: str, jobs: list[SimulatedJob]) -> list[SimulatedJob]:
    return VARIANTS[variant].of(jobs, seed=5)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_variant_keeps_arrivals_promises_and_declarations(
    variant: str, jobs: list[SimulatedJob]
) -> None:
    changed = _of(variant, jobs)
    assert [(one.job, one.arrival_s) for one in changed] == [
        (one.job, one.arrival_s) for one in jobs
    ]
    assert as_numbers(changed) == as_numbers(_of(variant, jobs))


def test_each_variant_breaks_one_assumption_and_all_breaks_each(
    jobs: list[SimulatedJob],
) -> None:
    def broken(variant: str) -> set[str]:
        changed, usual, world = _of(variant, jobs), World(), VARIANTS[variant].world
        found = {name for name in World.__slots__ if getattr(world, name) != getattr(usual, name)}
        if any(one.curve != other.curve for one, other in zip(changed, jobs, strict=True)):
            found.add("curve")
        if as_numbers(changed) != as_numbers(jobs):
            found.add("lengths")
        if any(one.curve_powers for one in changed):
            found.add("curve_powers")
        return found

    assert broken(AS_PUBLISHED) == set()
    single = {
        variant: broken(variant)
        for variant in VARIANTS
        if variant not in (AS_PUBLISHED, "all", "irregular_tails", "slow_tails")
    }
    assert all(len(names) == 1 for names in single.values())
    assert broken("all") == set().union(*single.values())
    assert broken("irregular_tails") == {"curve_powers"}
    assert broken("slow_tails") == {"curve_powers", "tail_room_ratio"}


def test_own_tails_are_drawn_widely(jobs: list[SimulatedJob]) -> None:
    curves = [one.curve for one in _of("own_tails", jobs)]
    shapes = [best_shape(curve, accelerators=8) for curve in curves if curve != NO_TAIL]
    assert 0.1 < curves.count(NO_TAIL) / len(jobs) < 0.3
    assert min(shape.node_ratio for shape in shapes) < 0.4
    assert max(shape.node_ratio for shape in shapes) > 0.85
    for curve in curves:
        assert list(curve) == sorted(curve)
        assert all(0 < point.time_ratio < 1 and 0 < point.complete_ratio < 1 for point in curve)


def test_responses_of_equal_lengths_have_no_tail() -> None:
    assert best_shape(lognormal_curve(0.0), accelerators=8) == UNDIVIDED


def test_autocorrelated_durations_keep_their_spread(jobs: list[SimulatedJob]) -> None:
    ratios, neighbours = [], []
    for one in _of("autocorrelated", jobs):
        deviation = one.lengths_s / np.array(one.means_s) - 1.0
        ratios.append(deviation)
        neighbours.append(np.stack([deviation[:-1], deviation[1:]], axis=-1).reshape(-1, 2))
        assert (one.lengths_s <= [phase.max_s + 1e-6 for phase in one.job.phases]).all()
    assert np.concatenate(ratios).std() == pytest.approx(PHASE_CV, rel=0.05)
    before, after = np.concatenate(neighbours).T
    assert np.corrcoef(before, after)[0, 1] == pytest.approx(AUTOCORRELATION, abs=0.03)


def test_one_rollout_of_thirty_straggles_past_what_was_declared(jobs: list[SimulatedJob]) -> None:
    slower = np.concatenate(
        [
            changed.lengths_s / one.lengths_s
            for changed, one in zip(_of("stragglers", jobs), jobs, strict=True)
        ]
    )
    assert (slower[:, 1] == 1.0).all()
    assert set(np.round(slower[:, 0], 9)) == {1.0, STRAGGLER_FACTOR}
    assert (slower[:, 0] > 1.0).mean() == pytest.approx(1 / 30, abs=0.003)
    longest = max(
        one.lengths_s[:, 0].max() / one.job.phases[0].max_s for one in _of("stragglers", jobs)
    )
    assert longest > 1.1


def test_alone_a_job_takes_its_cold_start_its_phases_and_its_syncs() -> None:
    one = w1(5, jobs=1)[0]
    world = World(cold_start_s=50.0, sync_s=20.0)
    phases_s = float(one.lengths_s.sum())
    assert one.solo_s(world) == pytest.approx(50.0 + phases_s + 20.0 * one.iterations)


@pytest.mark.parametrize("variant", ["slow_moves", "slow_starts", "own_tails"])
def test_a_run_obeys_the_world_that_it_is_given(variant: str) -> None:
    few, world = w1(4, jobs=6), VARIANTS[variant].world
    usual = arm_result(few, run_arm(ARMS["ours"], few, seed=4))
    changed = VARIANTS[variant].of(few, seed=4)
    found = arm_result(changed, run_arm(ARMS["ours"], changed, seed=4, world=world), world)
    assert found.jobs == usual.jobs
    assert found.dollars != usual.dollars
