"""The learned threshold: the one that frees the most accelerator time, in whole accelerators."""

import pytest
from msgspec.structs import replace

from scheduler.model import Completion, JobSpec
from scheduler.rollmux.beliefs.facts import JobFacts
from scheduler.rollmux.beliefs.tail import (
    PAPER_THRESHOLD,
    UNDIVIDED,
    TailShape,
    best_shape,
    best_tail,
)
from scheduler.rollmux.forecast.judge import Judge
from scheduler.rollmux.planner.planner import GroupPlanner
from scheduler.sim.rollmux.baselines import PAPER_TAIL
from tests.unit.scheduler.rollmux.planner.planned_jobs import TYPES, planned_job, with_curve

W1 = (Completion(0.5, 0.8),)


def test_the_paper_s_threshold_on_the_workload_s_curve_is_half_the_time_and_a_quarter() -> None:
    assert best_tail(W1, accelerators=8) == (PAPER_THRESHOLD, PAPER_TAIL)


def test_a_curve_that_completes_early_moves_its_tail_earlier_than_the_paper_would() -> None:
    early = (Completion(0.1, 0.9), Completion(0.5, 0.92))
    paper = TailShape(bulk_ratio=0.1 * PAPER_THRESHOLD / 0.9, share=PAPER_TAIL.share)
    assert best_shape(early, accelerators=8).node_ratio < paper.node_ratio


@pytest.mark.parametrize("curve", [(), (Completion(0.999, 0.01),)])
def test_a_rollout_without_a_tail_is_undivided(curve: tuple[Completion, ...]) -> None:
    assert best_shape(curve, accelerators=1) == UNDIVIDED


def _whole(job: JobSpec) -> JobSpec:
    """Its rollouts are not divisible."""
    rollout, training = job.phases
    return replace(job, phases=(replace(rollout, divisible=False), training))


def test_a_tail_is_unknown_until_it_is_declared_or_seen() -> None:
    planner = GroupPlanner(Judge(), TYPES)
    planner.place_job(planned_job("unknown", 400, 150), now=0.0)
    declared, whole = (
        with_curve(planned_job(name, 400, 150), *W1) for name in ("declared", "whole")
    )
    planner.place_job(declared, now=0.0)
    planner.place_job(_whole(whole), now=0.0)
    tails = {str(job): facts.tail for job, facts in planner.facts.items()}
    assert tails["unknown"] == tails["whole"] == UNDIVIDED
    assert tails["declared"] == best_shape(W1, accelerators=8)


def test_a_learned_tail_renews_the_belief_only_where_its_shape_has_changed() -> None:
    facts = JobFacts.of(planned_job("a", 400, 150), cold_start_s=0.0, now=0.0)

    def version_after(*curve: tuple[float, float]) -> int:
        facts.learn_tail([Completion(*point) for point in curve], accelerators=8)
        facts.belief()
        return facts.version

    undivided = version_after()
    seen = version_after((0.5, 0.8))
    assert seen > undivided
    assert version_after((0.51, 0.8)) == seen
    assert facts.tail.bulk_ratio == pytest.approx(0.5)
    moved = version_after((0.53, 0.8))
    assert moved > seen
    assert facts.tail.bulk_ratio == pytest.approx(0.53)
    assert version_after((0.53, 0.95)) > moved
    assert facts.tail.share == 0.125


def test_a_rollout_that_is_not_divisible_has_no_tail_whatever_its_curve() -> None:
    facts = JobFacts.of(_whole(planned_job("a", 400, 150)), cold_start_s=0.0, now=0.0)
    facts.learn_tail(W1, accelerators=8)
    assert facts.tail == UNDIVIDED
    assert not facts.divisible
