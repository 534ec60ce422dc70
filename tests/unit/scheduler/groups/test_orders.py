"""Orders within a group: the theorem against brute force, and where a better order is found."""

from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.groups.judge import OUR_RULES
from scheduler.policy.groups.stages import CREDIT, CYCLIC, FIFO, Rules
from scheduler.policy.groups.theorem import conditions
from tests.unit.scheduler.groups.stage_jobs import exact_slowdowns, occupant

FREE = {"migrate": False, "prewarm": False, "warm_s": 0.0, "migrate_s": 0.0, "reserve_ratio": 0.0}
ROUND_ROBIN = Rules(order=CYCLIC, **FREE)
CREDITED = Rules(order=CREDIT, **FREE)


def best_cycle_s(jobs: list[tuple[float, float]]) -> float:
    """Shortest steady meta-iteration over every pair of orders, by brute force.

    Each pool serves every job once a round in its own order; the round's length is what repeats.
    """
    best = float("inf")
    orders = list(permutations(range(len(jobs))))
    for rollouts, trainings in product(orders, orders):
        rolled = trained = 0.0
        training_end_s = [0.0] * len(jobs)
        ends_s = []
        for _ in range(12):
            rollout_end_s = [0.0] * len(jobs)
            for job in rollouts:
                rolled = max(rolled, training_end_s[job]) + jobs[job][0]
                rollout_end_s[job] = rolled
            for job in trainings:
                trained = max(trained, rollout_end_s[job]) + jobs[job][1]
                training_end_s[job] = trained
            ends_s.append(trained)
        best = min(best, (ends_s[-1] - ends_s[5]) / 6)
    return best


phases = st.tuples(st.integers(20, 400), st.integers(20, 400))


@settings(max_examples=40, deadline=None)
@given(st.lists(phases, min_size=2, max_size=3))
def test_the_round_robin_of_an_unsaturated_group_is_as_short_as_any_order(
    jobs: list[tuple[int, int]],
) -> None:
    members = [occupant(float(rollout), float(training)) for rollout, training in jobs]
    found = conditions(members)
    slow = exact_slowdowns(members, ROUND_ROBIN)
    cycle_s = max(s * sum(job) for s, job in zip(slow, jobs, strict=True))
    shortest_s = best_cycle_s([(float(a), float(b)) for a, b in jobs])
    assert shortest_s >= max(found.cycle_s, found.load_s) * 0.999
    if found.hold and len(jobs) == 2:
        assert cycle_s == pytest.approx(max(found.cycle_s, shortest_s), rel=0.03)


def test_the_conditions_name_full_and_oversaturated_groups() -> None:
    full = conditions([occupant(100.0, 100.0), occupant(100.0, 100.0)])
    over = conditions([occupant(150.0, 50.0), occupant(150.0, 50.0)])
    assert (full.hold, full.saturated) == (True, True)
    assert (over.hold, over.saturated) == (False, True)


def test_of_unequal_cycles_credit_lets_the_short_job_run_more_often() -> None:
    members = [
        occupant(500.0, 100.0, rollout=1, training=4),
        occupant(150.0, 100.0, rollout=2, training=4),
    ]
    in_turn, by_credit = (exact_slowdowns(members, rules) for rules in (ROUND_ROBIN, CREDITED))
    assert in_turn[1] > 2.0
    assert by_credit[1] < 1.3


def test_credit_protects_the_tight_job_where_first_come_first_served_does_not() -> None:
    members = [
        occupant(300.0, 200.0, slo=1.03, rollout=1, training=4),
        occupant(60.0, 140.0, slo=3.0, rollout=2, training=4),
        occupant(90.0, 140.0, slo=3.0, rollout=8, training=4),
    ]
    by_credit = exact_slowdowns(members, CREDITED)
    served = exact_slowdowns(members, Rules(order=FIFO, **FREE))
    assert by_credit[0] - 1.0 < 0.5 * (served[0] - 1.0)


tight_phases = st.tuples(st.integers(20, 400), st.integers(20, 400), st.floats(1.0, 2.0))


@settings(max_examples=60, deadline=None)
@given(st.lists(tight_phases, min_size=2, max_size=5), st.sampled_from([CREDIT, CYCLIC, FIFO]))
def test_nobody_starves_even_where_every_promise_is_broken(
    jobs: list[tuple[int, int, float]], order: int
) -> None:
    """All on one node of each pool: nobody is much slower than sharing makes it."""
    members = [occupant(float(a), float(b), slo=slo) for a, b, slo in jobs]
    slow = exact_slowdowns(members, OUR_RULES._replace(order=order))
    round_s = sum(a + b for a, b, _ in jobs)
    for found, (rollout_s, training_s, slo) in zip(slow, jobs, strict=True):
        fair = len(jobs) if order == CREDIT else round_s / (rollout_s + training_s)
        assert found <= 2.0 * slo * fair


def test_first_come_first_served_lets_nobody_pass_a_job_that_waits_for_several_nodes() -> None:
    """Two narrow jobs in turn would keep one of its two nodes busy for ever."""
    wide = occupant(100.0, 10.0, rollout=3, training=4)
    narrow = [occupant(100.0, 1.0, rollout=1 << at, training=8 << at) for at in range(2)]
    served = exact_slowdowns([wide, *narrow], Rules(order=FIFO, **FREE))
    assert served[0] < 2.0
    assert max(served[1:]) < 2.2


def test_a_moved_tail_lets_the_next_rollout_begin_on_what_it_left() -> None:
    moved = Rules(order=CREDIT, **{**FREE, "migrate": True})
    members = [occupant(300.0, 100.0, bulk=0.5) for _ in range(2)]
    assert max(exact_slowdowns(members, moved)) < 0.9 * max(exact_slowdowns(members, CREDITED))
