"""First come, first served: fair, without overtaking, and out of the way of moved tails."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.rollmux.forecast.forecast import group_load
from scheduler.rollmux.forecast.judge import OUR_RULES
from scheduler.rollmux.forecast.stages import Rules
from tests.unit.scheduler.rollmux.forecast.stage_jobs import exact_slowdowns, occupant

PLAIN = Rules(migrate=False, warm_s=0.0, migrate_s=0.0)


def test_the_load_of_a_group_is_its_longest_iteration_and_its_busiest_node() -> None:
    assert group_load([occupant(100.0, 100.0), occupant(90.0, 90.0)]) == (200.0, 190.0)
    assert group_load([occupant(100.0, 100.0), occupant(100.0, 100.0)]) == (200.0, 200.0)


def test_a_tail_that_moves_counts_for_its_share_of_a_node() -> None:
    pair = [occupant(200.0, 60.0, bulk=0.5), occupant(200.0, 60.0, bulk=0.5)]
    assert group_load(pair) == (260.0, 400.0)
    assert group_load(pair, tails_move=True) == (260.0, 2 * (100.0 + 0.25 * 100.0))


def test_the_job_with_the_shorter_cycle_runs_more_often() -> None:
    members = [
        occupant(500.0, 100.0, rollout=1, training=4),
        occupant(150.0, 100.0, rollout=2, training=4),
    ]
    long, short = exact_slowdowns(members, PLAIN)
    assert short < 1.3
    assert long < 1.2


tight_phases = st.tuples(st.integers(20, 400), st.integers(20, 400))


@settings(max_examples=60, deadline=None)
@given(st.lists(tight_phases, min_size=2, max_size=5))
def test_between_two_iterations_of_a_job_each_other_job_passes_once(
    jobs: list[tuple[int, int]],
) -> None:
    """All on one node of each pool: an iteration lasts at most one phase of every job."""
    members = [occupant(float(a), float(b)) for a, b in jobs]
    slow = exact_slowdowns(members, OUR_RULES)
    round_s = sum(a + b + 2 * OUR_RULES.warm_s for a, b in jobs)
    for found, (rollout_s, training_s) in zip(slow, jobs, strict=True):
        assert found * (rollout_s + training_s) <= 1.1 * round_s


def test_no_job_passes_one_that_waits_for_several_nodes() -> None:
    """Two narrow jobs in turn would keep one of its two nodes busy for ever."""
    wide = occupant(100.0, 10.0, rollout=3, training=4)
    narrow = [occupant(100.0, 1.0, rollout=1 << at, training=8 << at) for at in range(2)]
    served = exact_slowdowns([wide, *narrow], PLAIN)
    assert served[0] < 2.0
    assert max(served[1:]) < 2.2


def test_a_moved_tail_lets_the_next_rollout_begin_on_what_it_left() -> None:
    members = [occupant(300.0, 100.0, bulk=0.5) for _ in range(2)]
    moved = exact_slowdowns(members, PLAIN._replace(migrate=True))
    assert max(moved) < 0.9 * max(exact_slowdowns(members, PLAIN))


def test_a_rollout_that_is_not_divisible_waits_until_the_tail_has_ended() -> None:
    """The other's tail leaves three quarters of the node after half of its time: to no avail."""
    tails = PLAIN._replace(migrate=True)

    def served(*, divisible: bool, migrates: bool = True) -> list[float]:
        first = occupant(300.0, 100.0, bulk=0.5)
        second = occupant(300.0, 100.0, divisible=divisible)
        return exact_slowdowns([first, second], tails if migrates else PLAIN)

    assert served(divisible=False) == served(divisible=False, migrates=False)
    assert max(served(divisible=True)) < 0.95 * max(served(divisible=False))


def test_a_job_behind_an_indivisible_rollout_does_not_pass_it() -> None:
    tails = PLAIN._replace(migrate=True)
    jobs = [occupant(300.0, 100.0, bulk=0.5) for _ in range(2)]
    whole = occupant(100.0, 500.0, training=4, divisible=False)
    assert exact_slowdowns([*jobs, whole], tails)[2] < 1.7
