"""The inter-group scheduler: cheapest opening, invariants, moves that restore promises."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.ids import JobId, TenantId
from scheduler.policy.groups.book import NodeType
from scheduler.policy.groups.events import (
    AddNode,
    GroupEffect,
    JobArrived,
    JobEnded,
    JobMoved,
    MoveJob,
    NodeFailed,
    PhaseEnded,
    PlaceJob,
    ReleaseNode,
    ReviewDue,
)
from scheduler.policy.groups.judge import Distributional, WorstCase
from scheduler.policy.groups.planner import GroupPlanner, PlannerConfig
from scheduler.policy.model import Job, Node, Phase, PhaseKind, Pool, group_faults

TYPES = {
    Pool.ROLLOUT: NodeType(type="r", accelerators=8, price_per_hour=15.0, host_bytes=2000),
    Pool.TRAINING: NodeType(type="t", accelerators=8, price_per_hour=42.0, host_bytes=2000),
}
HOUR_S = 3600.0


def _job(
    name: str, rollout_s: float, training_s: float, *, slo: float = 1.6, host: int = 400
) -> Job:
    kinds = ((PhaseKind.ROLLOUT, rollout_s / 0.8), (PhaseKind.TRAINING, training_s / 0.7))
    return Job(
        job=JobId(name),
        tenant=TenantId("t"),
        phases=tuple(Phase(kind=kind, mean_s=most, max_s=most) for kind, most in kinds),
        host_bytes_per_node=host,
        slowdown_slo=slo,
    )


def _planner(*, worst_case: bool = False) -> GroupPlanner:
    judge = WorstCase() if worst_case else Distributional()
    return GroupPlanner(judge, TYPES, PlannerConfig(moves=not worst_case))


def _learn(planner: GroupPlanner, job: Job, *, times: int, now: float) -> None:
    for _ in range(times):
        for phase, ratio in zip(job.phases, (0.8, 0.7), strict=True):
            solo_s = phase.max_s * ratio
            planner.observe(PhaseEnded(job=job.job, phase=phase.kind, solo_s=solo_s), now=now)


def _nodes(effects: tuple[GroupEffect, ...]) -> list[Node]:
    return [effect.node for effect in effects if isinstance(effect, AddNode)]


def _placed(effects: tuple[GroupEffect, ...]) -> PlaceJob:
    return next(effect for effect in effects if isinstance(effect, PlaceJob))


def test_the_first_job_gets_its_own_nodes_with_a_reason() -> None:
    effects = _planner().observe(JobArrived(job=_job("a", 400, 150)), now=0.0)
    assert [node.pool for node in _nodes(effects)] == [Pool.ROLLOUT, Pool.TRAINING]
    assert _placed(effects).reason == "new isolated group, +57.00 $/h"


def test_a_second_rollout_heavy_job_shares_the_training_node_at_least() -> None:
    for worst_case in (False, True):
        planner = _planner(worst_case=worst_case)
        for name in ("a", "b"):
            effects = planner.observe(JobArrived(job=_job(name, 400, 150)), now=0.0)
        assert Pool.TRAINING not in {node.pool for node in _nodes(effects)}


def test_memory_is_a_hard_limit() -> None:
    planner = _planner()
    planner.observe(JobArrived(job=_job("a", 400, 150, host=1200)), now=0.0)
    effects = planner.observe(JobArrived(job=_job("b", 400, 150, host=1200)), now=0.0)
    assert len(_nodes(effects)) == 2


def test_a_job_that_tolerates_nothing_stays_alone() -> None:
    planner = _planner()
    planner.observe(JobArrived(job=_job("a", 300, 300)), now=0.0)
    effects = planner.observe(JobArrived(job=_job("b", 310, 290, slo=1.0)), now=0.0)
    assert len(_nodes(effects)) == 2


def test_a_departure_gives_its_nodes_back() -> None:
    planner = _planner()
    job = _job("a", 400, 150)
    up = _nodes(planner.observe(JobArrived(job=job), now=0.0))
    down = planner.observe(JobEnded(job=job.job), now=HOUR_S)
    assert down == tuple(ReleaseNode(node=node.node) for node in up)
    assert planner.book.price_per_hour() == 0.0


def test_a_failed_node_s_jobs_go_elsewhere_and_others_stay() -> None:
    planner = _planner()
    jobs = [_job(name, 400, 150) for name in ("a", "b")]
    placed = [_placed(planner.observe(JobArrived(job=job), now=0.0)) for job in jobs]
    lost = placed[1].placement.rollout_nodes[0]
    users = {one.placement.job for one in placed if lost in one.placement.rollout_nodes}
    effects = planner.observe(NodeFailed(node=lost), now=HOUR_S)
    moves = [effect for effect in effects if isinstance(effect, MoveJob)]
    assert {move.placement.job for move in moves} == users
    assert all(lost not in move.placement.rollout_nodes for move in moves)


def test_once_well_known_jobs_are_moved_together_when_that_spares_nodes() -> None:
    planner = _planner()
    jobs = [_job(name, 300, 250, slo=1.9) for name in ("a", "b", "c")]
    for job in jobs:
        planner.observe(JobArrived(job=job), now=0.0)
    before = planner.book.price_per_hour()
    for job in jobs:
        _learn(planner, job, times=30, now=0.0)
    now = 8 * HOUR_S
    for facts in planner.facts.values():
        facts.account.solo_s = now
    for _ in range(6):
        now += 60.0
        for effect in planner.observe(ReviewDue(), now=now):
            if isinstance(effect, MoveJob):
                planner.observe(JobMoved(job=effect.placement.job), now=now)
    assert planner.book.price_per_hour() <= before


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(100, 500), st.floats(60, 400), st.floats(1.0, 2.0), st.integers(200, 700)
        ),
        min_size=1,
        max_size=9,
    ),
    st.randoms(use_true_random=False),
)
def test_groups_stay_disjoint_and_memory_is_never_exceeded(
    drawn: list[tuple[float, float, float, int]], chance: Random
) -> None:
    planner, now, nodes = _planner(), 0.0, {}
    jobs = {
        JobId(f"j{at}"): _job(f"j{at}", a, b, slo=slo, host=host)
        for at, (a, b, slo, host) in enumerate(drawn)
    }
    waiting, active = list(jobs), []
    while waiting or active:
        now += 2 * HOUR_S
        events: list[JobArrived | JobEnded | ReviewDue] = [ReviewDue()]
        if waiting and (not active or chance.random() < 0.5):
            active.append(waiting.pop())
            events.insert(0, JobArrived(job=jobs[active[-1]]))
        elif chance.random() < 0.5 or not waiting:
            events.insert(0, JobEnded(job=active.pop(0)))
        for job in active:
            if job in planner.facts:
                _learn(planner, jobs[job], times=6, now=now)
        for event in events:
            effects = planner.observe(event, now=now)
            nodes |= {node.node: node for node in _nodes(effects)}
            groups = [cell.as_group() for cell in planner.book.cells.values()]
            assert group_faults(groups, nodes=nodes, jobs=jobs) == ()
            for effect in effects:
                if isinstance(effect, MoveJob) and chance.random() < 0.5:
                    planner.observe(JobMoved(job=effect.placement.job), now=now)
    assert planner.book.cells == {}
