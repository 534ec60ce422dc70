"""A limited supply of nodes: arrivals find the one group that takes them, moves need no more."""

from unittest.mock import patch

import pytest
from msgspec.structs import replace

from benchmarks.rollmux.resubmitting import ResubmittingPlanner
from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId, NodeId
from scheduler.model import PhaseKind, Pool
from scheduler.rollmux.forecast.judge import Judge
from scheduler.rollmux.planner.group_effects import AssignNodes
from scheduler.rollmux.planner.planner import GroupPlanner
from tests.unit.scheduler.rollmux.planner.planned_jobs import (
    TYPES,
    moves,
    planned_job,
    restarts,
)

HOUR_S = 3600.0


def _planner(
    rollout: int | None, training: int | None, *, kind: type[GroupPlanner] = GroupPlanner
) -> GroupPlanner:
    """A planner on that many nodes of each pool; None: unlimited."""
    there = ((Pool.ROLLOUT, rollout), (Pool.TRAINING, training))
    supply = {pool: count for pool, count in there if count is not None}
    return kind(Judge(), TYPES, supply=supply)


def _full(groups: int, *, shares: int) -> GroupPlanner:
    """A planner with one job on each pair of nodes, with `shares` as the only patient one."""
    planner = _planner(groups, groups)
    for at in range(groups):
        job = planned_job(f"j{at}", 40, 15, slo=4.0 if at == shares else 1.0)
        planner.place_job(job, now=float(at))
    return planner


@pytest.mark.parametrize("shares", [0, 63, 64, 149])
def test_the_one_group_that_admits_a_job_is_found_wherever_it_stands(shares: int) -> None:
    planner = _full(150, shares=shares)
    placed = planner.place_job(planned_job("late", 40, 15, slo=4.0), now=150.0)
    assert set(planner.table.groups[placed.group].pinned) == {f"j{shares}", "late"}


def test_a_refusal_names_the_number_of_examined_groups() -> None:
    planner = _full(70, shares=-1)
    with pytest.raises(Exhausted, match="none of the 70 groups admits it"):
        planner.place_job(planned_job("late", 40, 15, slo=4.0), now=70.0)
    assert JobId("late") not in planner.facts
    assert JobId("late") not in planner.table.home


def test_one_pool_may_be_limited_alone() -> None:
    planner = _planner(None, 1)
    planner.place_job(planned_job("a", 300, 300, slo=1.0), now=0.0)
    with pytest.raises(Exhausted, match=r"^needs 1 t of which 0 are free,"):
        planner.place_job(planned_job("b", 300, 300, slo=1.0), now=0.0)
    assert planner.table.up == {Pool.ROLLOUT: 1, Pool.TRAINING: 1}


def test_a_group_is_examined_again_once_its_jobs_are_known_to_leave_room() -> None:
    planner = _planner(1, 1)
    planner.place_job(planned_job("a", 2, 40, slo=1.05), now=0.0)
    late = planned_job("late", 2, 40, slo=1.4)

    def forecasts_made() -> int:
        with (
            patch.object(planner.packer, "admits", wraps=planner.packer.admits) as admits,
            pytest.raises(Exhausted),
        ):
            planner.place_job(late, now=1.0)
        return admits.call_count

    before = forecasts_made()
    for _ in range(100):
        planner.facts[JobId("a")].observe(PhaseKind.ROLLOUT, 20.0)
        planner.facts[JobId("a")].observe(PhaseKind.TRAINING, 4.0)
    assert forecasts_made() > before


def test_earlier_measurements_earn_no_credit() -> None:
    job = planned_job("a", 300, 200)
    measured = tuple(
        replace(phase, mean_s=seconds, cv=0.05, seen=40)
        for phase, seconds in zip(job.phases, (300.0, 200.0), strict=True)
    )
    taught, fresh = _planner(None, None), _planner(None, None)
    taught.place_job(replace(job, phases=measured), now=0.0)
    fresh.place_job(job, now=0.0)
    facts, untaught = taught.facts[JobId("a")], fresh.facts[JobId("a")]
    assert facts.account == untaught.account
    assert facts.open_s == 0.0
    assert facts.mature
    assert facts.belief().rollout_s == pytest.approx(300.0, rel=0.01)
    assert facts.belief().rollout_spread_s < untaught.belief().rollout_spread_s / 10


def _endangered(supply: int | None) -> tuple[GroupPlanner, list[AssignNodes], list[NodeId]]:
    """Two jobs in one group, which turn out too long for each other; the answer of a review."""
    planner = _planner(supply, supply)
    jobs = [planned_job(name, 200, 100, slo=1.9) for name in ("a", "b")]
    for job in jobs:
        planner.place_job(job, now=0.0)
    assert len(planner.table.groups) == 1
    for job in jobs:
        for _ in range(30):
            for kind, seconds in ((PhaseKind.ROLLOUT, 200.0), (PhaseKind.TRAINING, 600.0)):
                planner.observe_phase(job.job, kind, seconds, now=0.0)
        planner.facts[job.job].account.solo_s = 6 * HOUR_S
        planner.facts[job.job].account.slo = 1.1
    planner.table.take_changes()
    effects = planner.review(now=6 * HOUR_S)
    return planner, moves(effects), list(planner.table.take_changes()[0])


def test_a_review_moves_onto_no_node_that_is_not_there() -> None:
    planner, moved, added = _endangered(None)
    assert moved
    assert added
    planner, moved, added = _endangered(1)
    assert (moved, added) == ([], [])
    assert planner.table.up == {Pool.ROLLOUT: 1, Pool.TRAINING: 1}
    assert not any(facts.moving for facts in planner.facts.values())
    assert not any(planner.table.leaving_groups(job) for job in planner.facts)


def test_a_node_that_is_being_left_is_not_free_before_it_is_left() -> None:
    planner, moved, _ = _endangered(2)
    (move,) = moved
    late = planned_job("late", 300, 300, slo=1.0)
    with pytest.raises(Exhausted):
        planner.place_job(late, now=6 * HOUR_S)
    planner.complete_move(move.placement.job, now=6 * HOUR_S)
    assert planner.table.up == {Pool.ROLLOUT: 2, Pool.TRAINING: 2}


def test_an_evacuated_job_that_finds_no_place_gets_nodes_that_are_still_to_come() -> None:
    planner = _planner(1, 1, kind=ResubmittingPlanner)
    placed = planner.place_job(planned_job("a", 300, 200, slo=1.0), now=0.0)
    planner.table.take_changes()
    planner.table.supply = {Pool.ROLLOUT: 0, Pool.TRAINING: 1}
    effects = planner.fail_node(placed.placement.rollout_nodes[0], now=1.0)
    assert restarts(effects)
    assert len(planner.table.take_changes()[0]) == 2
