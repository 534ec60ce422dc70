"""The inter-group scheduler: cheapest opening, invariants, moves that restore promises."""

from functools import partial
from random import Random
from typing import Protocol

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rollmux.resubmitting import ResubmittingPlanner
from harvester.contracts.ids import JobId, NodeId
from scheduler.model import JobSpec, Pool
from scheduler.rollmux.forecast.judge import Judge
from scheduler.rollmux.planner.group_effects import AssignNodes, PlacementDecision
from scheduler.rollmux.planner.planner import GroupPlanner, PlannerConfig
from scheduler.sim.rollmux.baselines import WorstCase
from tests.unit.scheduler.faults import group_faults
from tests.unit.scheduler.rollmux.planner.planned_jobs import TYPES, moves, planned_job

HOUR_S = 3600.0


def _planner(*, worst_case: bool = False) -> GroupPlanner:
    judge = WorstCase() if worst_case else Judge()
    return GroupPlanner(judge, TYPES, PlannerConfig(moves=not worst_case))


def _learn(planner: GroupPlanner, job: JobSpec, *, times: int, now: float) -> None:
    for _ in range(times):
        for phase, ratio in zip(job.phases, (0.8, 0.7), strict=True):
            solo_s = phase.max_s * ratio
            planner.observe_phase(job.job, phase.kind, solo_s, now=now)


def _came(planner: GroupPlanner) -> list[Pool]:
    """Pools of the nodes that have come up."""
    return list(planner.table.take_changes()[0].values())


def test_the_first_job_gets_its_own_nodes_with_a_reason() -> None:
    planner = _planner()
    placed = planner.place_job(planned_job("a", 400, 150), now=0.0)
    assert _came(planner) == [Pool.ROLLOUT, Pool.TRAINING]
    assert placed.reason == "new isolated group, +57.00 $/h"


def test_a_second_rollout_heavy_job_shares_the_training_node_at_least() -> None:
    for worst_case in (False, True):
        planner = _planner(worst_case=worst_case)
        for name in ("a", "b"):
            planner.table.take_changes()
            planner.place_job(planned_job(name, 400, 150), now=0.0)
        assert Pool.TRAINING not in _came(planner)


def test_memory_is_a_hard_limit() -> None:
    planner = _planner()
    planner.place_job(planned_job("a", 400, 150, host=1200), now=0.0)
    planner.place_job(planned_job("b", 400, 150, host=1200), now=0.0)
    assert len(_came(planner)) == 4


def test_a_job_that_tolerates_nothing_stays_alone() -> None:
    planner = _planner()
    planner.place_job(planned_job("a", 300, 300), now=0.0)
    planner.place_job(planned_job("b", 310, 290, slo=1.0), now=0.0)
    assert len(_came(planner)) == 4


def test_a_departure_gives_its_nodes_back() -> None:
    planner = _planner()
    job = planned_job("a", 400, 150)
    planner.place_job(job, now=0.0)
    came, _ = planner.table.take_changes()
    planner.end_job(job.job, now=HOUR_S)
    assert planner.table.take_changes() == ({}, list(came))
    assert planner.table.price_per_hour() == 0.0


def test_once_well_known_jobs_are_moved_together_when_that_spares_nodes() -> None:
    planner = _planner()
    jobs = [planned_job(name, 300, 250, slo=1.9) for name in ("a", "b", "c")]
    for job in jobs:
        planner.place_job(job, now=0.0)
    before = planner.table.price_per_hour()
    _settled(planner, jobs)
    assert planner.table.price_per_hour() <= before


def test_wide_jobs_are_moved_together_too_when_that_spares_nodes() -> None:
    planner = _planner()
    jobs = [planned_job(name, 300, 250, slo=1.2, nodes=2) for name in ("a", "b", "c")]
    for job in jobs:
        planner.place_job(job, now=0.0)
    before = planner.table.price_per_hour()
    moved = _settled(planner, jobs)
    assert moved
    saved = before - planner.table.price_per_hour()
    assert saved > 0.0
    assert f"saves {saved:.2f} $/h" in moved[0].reason
    assert all(len(move.placement.rollout_nodes) == 2 for move in moved)


def _settled(planner: GroupPlanner, jobs: list[JobSpec]) -> list[AssignNodes]:
    """The moves once every job is known well and has credit for hours."""
    for job in jobs:
        _learn(planner, job, times=30, now=0.0)
    now, moved = 8 * HOUR_S, []
    for facts in planner.facts.values():
        facts.account.solo_s = now
    for _ in range(6):
        now += 60.0
        for move in moves(planner.review(now=now)):
            moved.append(move)
            planner.complete_move(move.placement.job, now=now)
    return moved


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(100, 500),
            st.floats(60, 400),
            st.floats(1.0, 2.0),
            st.integers(200, 700),
            st.integers(1, 2),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from((GroupPlanner, ResubmittingPlanner)),
    st.randoms(use_true_random=False),
)
def test_groups_stay_disjoint_and_memory_is_never_exceeded(
    drawn: list[tuple[float, float, float, int, int]], kind: type[GroupPlanner], chance: Random
) -> None:
    """For any arrivals, ends, failures and moves; no node is brought up or given back twice."""
    planner = kind(Judge(), TYPES)
    jobs = {
        JobId(f"j{at}"): planned_job(f"j{at}", a, b, slo=slo, host=host, nodes=nodes)
        for at, (a, b, slo, host, nodes) in enumerate(drawn)
    }
    now, up, on_the_way = 0.0, dict[NodeId, int](), set[JobId]()
    waiting, active = list(jobs), list[JobId]()
    while waiting or active:
        now += 2 * HOUR_S
        events: list[Event] = [planner.review]
        if up and chance.random() < 0.3:
            events.append(partial(planner.fail_node, chance.choice(sorted(up))))
        if waiting and (not active or chance.random() < 0.5):
            active.append(waiting.pop())
            events.insert(0, partial(planner.place_job, jobs[active[-1]]))
        elif chance.random() < 0.5 or not waiting:
            events.insert(0, partial(_end, planner, active.pop(0), on_the_way))
        for job in active:
            if job in planner.facts:
                _learn(planner, jobs[job], times=6, now=now)
        events += [
            partial(_complete_move, planner, job, on_the_way)
            for job in sorted(on_the_way)
            if chance.random() < 0.5
        ]
        for event in events:
            _tally(event(now=now), on_the_way)
            came, gone = planner.table.take_changes()
            assert not came.keys() & up.keys()
            up |= {node: TYPES[pool].host_bytes for node, pool in came.items()}
            for node in gone:
                del up[node]
            groups = planner.table.groups.values()
            assert group_faults(groups, host_bytes=up, jobs=jobs) == ()
            assert {node for one in groups for node in one.rollout + one.training} == {*up}
            assert {
                facts.spec.job for facts in planner.facts.values() if facts.moving
            } == on_the_way
    assert planner.table.groups == {}
    assert not up


class Event(Protocol):
    def __call__(self, *, now: float) -> AssignNodes | tuple[AssignNodes, ...] | None: ...


def _end(planner: GroupPlanner, job: JobId, on_the_way: set[JobId], *, now: float) -> None:
    on_the_way.discard(job)
    planner.end_job(job, now=now)


def _complete_move(
    planner: GroupPlanner, job: JobId, on_the_way: set[JobId], *, now: float
) -> None:
    if job in on_the_way:
        on_the_way.discard(job)
        planner.complete_move(job, now=now)


def _tally(answer: AssignNodes | tuple[AssignNodes, ...] | None, on_the_way: set[JobId]) -> None:
    """Updates a shell's knowledge of the jobs that move."""
    for assigned in answer if isinstance(answer, tuple) else ():
        if assigned.decision is PlacementDecision.MOVED:
            on_the_way.add(assigned.placement.job)
        else:
            on_the_way.discard(assigned.placement.job)


def test_a_shorter_warm_start_lets_a_saving_be_found_that_was_refused_before() -> None:
    planner = GroupPlanner(Judge().with_warm_start(400.0), TYPES)
    for job in (planned_job("a", 400, 300), planned_job("b", 400, 300)):
        planner.place_job(job, now=0.0)
        _learn(planner, job, times=6, now=4200.0)
    assert not any(planner.review(now=4300.0 + 60.0 * at) for at in range(3))
    planner.set_warm_start_s(1.0)
    assert any(moves(planner.review(now=4500.0 + 60.0 * at)) for at in range(3))
