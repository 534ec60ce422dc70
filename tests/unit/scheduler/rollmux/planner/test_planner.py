"""The inter-group scheduler: cheapest opening, invariants, moves that restore promises."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import JobSpec, Node, Pool
from scheduler.rollmux.forecast.judge import Judge
from scheduler.rollmux.planner.group_events import (
    AddNode,
    GroupEffect,
    GroupEvent,
    JobArrived,
    JobEnded,
    JobMoved,
    MoveJob,
    NodeFailed,
    PhaseMeasured,
    PlaceJob,
    ReleaseNode,
    RestartJob,
    ReviewDue,
)
from scheduler.rollmux.planner.planner import GroupPlanner, PlannerConfig
from scheduler.sim.rollmux.baselines import WorstCase
from tests.unit.scheduler.faults import group_faults
from tests.unit.scheduler.rollmux.planner.planned_jobs import TYPES, planned_job

HOUR_S = 3600.0


def _planner(*, worst_case: bool = False) -> GroupPlanner:
    judge = WorstCase() if worst_case else Judge()
    return GroupPlanner(judge, TYPES, PlannerConfig(moves=not worst_case))


def _learn(planner: GroupPlanner, job: JobSpec, *, times: int, now: float) -> None:
    for _ in range(times):
        for phase, ratio in zip(job.phases, (0.8, 0.7), strict=True):
            solo_s = phase.max_s * ratio
            planner.observe(PhaseMeasured(job=job.job, phase=phase.kind, solo_s=solo_s), now=now)


def _nodes(effects: tuple[GroupEffect, ...]) -> list[Node]:
    return [effect.node for effect in effects if isinstance(effect, AddNode)]


def _placed(effects: tuple[GroupEffect, ...]) -> PlaceJob:
    return next(effect for effect in effects if isinstance(effect, PlaceJob))


def test_the_first_job_gets_its_own_nodes_with_a_reason() -> None:
    effects = _planner().observe(JobArrived(job=planned_job("a", 400, 150)), now=0.0)
    assert [node.pool for node in _nodes(effects)] == [Pool.ROLLOUT, Pool.TRAINING]
    assert _placed(effects).reason == "new isolated group, +57.00 $/h"


def test_a_second_rollout_heavy_job_shares_the_training_node_at_least() -> None:
    for worst_case in (False, True):
        planner = _planner(worst_case=worst_case)
        for name in ("a", "b"):
            effects = planner.observe(JobArrived(job=planned_job(name, 400, 150)), now=0.0)
        assert Pool.TRAINING not in {node.pool for node in _nodes(effects)}


def test_memory_is_a_hard_limit() -> None:
    planner = _planner()
    planner.observe(JobArrived(job=planned_job("a", 400, 150, host=1200)), now=0.0)
    effects = planner.observe(JobArrived(job=planned_job("b", 400, 150, host=1200)), now=0.0)
    assert len(_nodes(effects)) == 2


def test_a_job_that_tolerates_nothing_stays_alone() -> None:
    planner = _planner()
    planner.observe(JobArrived(job=planned_job("a", 300, 300)), now=0.0)
    effects = planner.observe(JobArrived(job=planned_job("b", 310, 290, slo=1.0)), now=0.0)
    assert len(_nodes(effects)) == 2


def test_a_departure_gives_its_nodes_back() -> None:
    planner = _planner()
    job = planned_job("a", 400, 150)
    up = _nodes(planner.observe(JobArrived(job=job), now=0.0))
    down = planner.observe(JobEnded(job=job.job), now=HOUR_S)
    assert down == tuple(ReleaseNode(node=node.node) for node in up)
    assert planner.book.price_per_hour() == 0.0


def test_once_well_known_jobs_are_moved_together_when_that_spares_nodes() -> None:
    planner = _planner()
    jobs = [planned_job(name, 300, 250, slo=1.9) for name in ("a", "b", "c")]
    for job in jobs:
        planner.observe(JobArrived(job=job), now=0.0)
    before = planner.book.price_per_hour()
    _settled(planner, jobs)
    assert planner.book.price_per_hour() <= before


def test_wide_jobs_are_moved_together_too_when_that_spares_nodes() -> None:
    planner = _planner()
    jobs = [planned_job(name, 300, 250, slo=1.2, nodes=2) for name in ("a", "b", "c")]
    for job in jobs:
        planner.observe(JobArrived(job=job), now=0.0)
    before = planner.book.price_per_hour()
    moved = _settled(planner, jobs)
    assert moved
    saved = before - planner.book.price_per_hour()
    assert saved > 0.0
    assert f"saves {saved:.2f} $/h" in moved[0].reason
    assert all(len(move.placement.rollout_nodes) == 2 for move in moved)


def _settled(planner: GroupPlanner, jobs: list[JobSpec]) -> list[MoveJob]:
    """The moves once every job is known well and has credit for hours."""
    for job in jobs:
        _learn(planner, job, times=30, now=0.0)
    now, moves = 8 * HOUR_S, []
    for facts in planner.facts.values():
        facts.account.solo_s = now
    for _ in range(6):
        now += 60.0
        for effect in planner.observe(ReviewDue(), now=now):
            if isinstance(effect, MoveJob):
                moves.append(effect)
                planner.observe(JobMoved(job=effect.placement.job), now=now)
    return moves


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
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_groups_stay_disjoint_and_memory_is_never_exceeded(
    drawn: list[tuple[float, float, float, int, int]], resubmits: bool, chance: Random
) -> None:
    """For any arrivals, ends, failures and moves; no node is brought up or given back twice."""
    planner = GroupPlanner(Judge(), TYPES, PlannerConfig(resubmits=resubmits))
    jobs = {
        JobId(f"j{at}"): planned_job(f"j{at}", a, b, slo=slo, host=host, nodes=nodes)
        for at, (a, b, slo, host, nodes) in enumerate(drawn)
    }
    now, up, on_the_way = 0.0, dict[NodeId, Node](), set[JobId]()
    waiting, active = list(jobs), list[JobId]()
    while waiting or active:
        now += 2 * HOUR_S
        events: list[GroupEvent] = [ReviewDue()]
        if up and chance.random() < 0.3:
            events.append(NodeFailed(node=chance.choice(sorted(up))))
        if waiting and (not active or chance.random() < 0.5):
            active.append(waiting.pop())
            events.insert(0, JobArrived(job=jobs[active[-1]]))
        elif chance.random() < 0.5 or not waiting:
            events.insert(0, JobEnded(job=active.pop(0)))
        for job in active:
            if job in planner.facts:
                _learn(planner, jobs[job], times=6, now=now)
        events += [JobMoved(job=job) for job in sorted(on_the_way) if chance.random() < 0.5]
        for event in events:
            if isinstance(event, JobMoved) and event.job not in on_the_way:
                continue
            effects = planner.observe(event, now=now)
            _tally(event, effects, up, on_the_way)
            groups = [cell.as_group() for cell in planner.book.cells.values()]
            assert group_faults(groups, nodes=up, jobs=jobs) == ()
            assert {node for one in groups for node in one.rollout_nodes + one.training_nodes} == {
                *up
            }
            assert {facts.job.job for facts in planner.facts.values() if facts.moving} == on_the_way
    assert planner.book.cells == {}
    assert not up


def _tally(
    event: GroupEvent,
    effects: tuple[GroupEffect, ...],
    up: dict[NodeId, Node],
    on_the_way: set[JobId],
) -> None:
    """Updates a shell's knowledge by the effects."""
    if isinstance(event, JobMoved | JobEnded):
        on_the_way.discard(event.job)
    for effect in effects:
        match effect:
            case AddNode(node=node):
                assert node.node not in up
                up[node.node] = node
            case ReleaseNode(node=name):
                del up[name]
            case MoveJob(placement=placement):
                on_the_way.add(placement.job)
            case RestartJob(placement=placement):
                on_the_way.discard(placement.job)
                assert {*placement.rollout_nodes, *placement.training_nodes} <= {*up}
            case PlaceJob():
                pass
