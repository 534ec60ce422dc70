"""Rounds found by search: never worse than the round robin, and as good as brute force finds."""

from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.groups.forecast import Occupant, Roster
from scheduler.policy.groups.rehearsal import meta_iteration, rehearsed
from scheduler.policy.groups.rounds import search_order
from scheduler.policy.groups.stages import CREDIT, CYCLIC, Rules
from scheduler.policy.model import PhaseKind
from tests.unit.scheduler.groups.stage_jobs import occupant

RULES = Rules(CYCLIC, False, False, 0.0, 0.0, 0.0)
TAILS = Rules(CREDIT, True, True, 5.0, 3.0, 0.03)

_phases = st.tuples(st.integers(20, 400), st.integers(20, 400), st.floats(1.0, 3.0))


def _apart(*jobs: tuple[float, float], slo: float = 1.5) -> list[Occupant]:
    """Rollout nodes of their own, one node to train on."""
    return [
        occupant(rollout_s, training_s, slo=slo, rollout=1 << at, training=1 << len(jobs))
        for at, (rollout_s, training_s) in enumerate(jobs)
    ]


@settings(max_examples=15, deadline=None)
@given(st.lists(_phases, min_size=1, max_size=3))
def test_is_never_worse_than_the_round_robin(jobs: list[tuple[int, int, float]]) -> None:
    members = [occupant(float(a), float(b), slo=slo) for a, b, slo in jobs]
    found = search_order(members, rules=RULES, tries=60)
    assert found.gain >= 1.0
    assert found.found.worst <= found.round_robin.worst
    assert set(found.turns) == set(range(len(jobs)))


def test_where_the_theorem_holds_for_equal_jobs_there_is_nothing_to_gain() -> None:
    found = search_order(_apart((200.0, 100.0), (200.0, 100.0)), rules=RULES)
    assert found.conditions.hold
    assert found.gain == pytest.approx(1.0, abs=0.01)


def test_a_short_job_gets_several_turns_beside_a_long_one() -> None:
    found = search_order(_apart((800.0, 100.0), (150.0, 100.0)), rules=RULES)
    assert found.conditions.hold
    assert found.turns.count(1) >= 3
    assert found.gain > 2.0
    assert found.found.worst < 1.0 < found.round_robin.worst


def test_the_sequence_of_equal_counts_is_the_best_of_all_permutations() -> None:
    """Rotations and reflections aside, three jobs have two orders: both are tried."""
    members = [occupant(100.0, 300.0), occupant(300.0, 100.0), occupant(200.0, 150.0)]
    found = search_order(members, rules=RULES)
    by_hand = [
        search_order([members[at] for at in order], rules=RULES, tries=0).round_robin.worst
        for order in permutations(range(3))
    ]
    assert found.found.worst <= min(by_hand) + 1e-6


def test_it_is_patient_for_as_long_as_its_round_keeps_a_node() -> None:
    hasty = search_order(_apart((200.0, 100.0), (200.0, 100.0)), rules=RULES)
    members = _apart((800.0, 100.0), (150.0, 100.0))
    kept = search_order(members, rules=RULES)
    assert hasty.patience_s == pytest.approx(30.0, abs=1.0)
    assert kept.patience_s >= 0.1 * 900.0


def test_a_round_is_searched_within_its_tries() -> None:
    members = [occupant(100.0 + 40 * at, 90.0, training=2) for at in range(5)]
    assert search_order(members, rules=RULES, tries=30).tried <= 40


def test_a_rehearsal_gives_every_node_to_one_job_at_a_time() -> None:
    members = [occupant(300.0, 100.0, bulk=0.5), occupant(200.0, 250.0, bulk=0.6)]
    stretches = rehearsed(Roster.of(members), rules=TAILS)
    for node in (1, 2):
        whole = [(s.start_s, s.end_s) for s in stretches if s.nodes & node and not s.tail]
        assert len(whole) > 5
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(whole))
    assert any(s.tail for s in stretches)


def test_a_meta_iteration_begins_with_the_longest_job_and_holds_all() -> None:
    members = _apart((800.0, 100.0), (150.0, 100.0))
    found = meta_iteration(Roster.of(members), rules=RULES._replace(order=CREDIT))
    assert found.length_s >= 900.0
    assert found.stretches[0].start_s == 0.0
    assert {(s.job, s.phase) for s in found.stretches} == {
        (job, phase) for job in (0, 1) for phase in PhaseKind
    }
