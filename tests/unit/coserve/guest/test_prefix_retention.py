"""Retention of prefixes, and their order of eviction."""

from hypothesis import given
from hypothesis import strategies as st

from coserve.guest.prefix_retention import MOST_TRAJECTORIES, PrefixRetention


def test_the_oldest_of_equals_goes_first() -> None:
    retention = PrefixRetention()
    for second, name in enumerate("abc"):
        assert retention.left(name, [second], now=float(second))
    assert retention.least_first(now=3.0) == ["a", "b", "c"]


def test_a_trajectory_that_came_back_before_outlives_younger_first_turns() -> None:
    retention = PrefixRetention()
    retention.left("old hand", [1], now=0.0)
    retention.came_back("old hand", now=1.0)
    for number in range(20):
        name = f"single turn {number}"
        retention.left(name, [10 + number], now=2.0)
    retention.given_up(now=700.0)
    retention.left("old hand", [1, 2], now=700.0)
    retention.left("beginner", [3], now=701.0)
    assert retention.least_first(now=702.0) == ["beginner", "old hand"]


def test_no_prefix_of_a_job_of_single_turns_is_kept() -> None:
    retention = PrefixRetention()
    for number in range(20):
        assert retention.left(f"t{number}", [number], now=0.0)
    assert len(retention.given_up(now=601.0)) == 20
    assert not retention.left("next", [1], now=601.0)
    assert retention.blocks == 0


def test_a_present_trajectory_goes_last_and_may_be_turned_away() -> None:
    retention = PrefixRetention()
    retention.left("a", [1], now=0.0)
    retention.left("b", [2], now=1.0)
    retention.came_back("a", now=2.0)
    assert retention.least_first(now=2.0) == ["b", "a"]
    retention.turned_away("a", now=3.0)
    assert retention.least_first(now=3.0) == ["b", "a"], "seen last, but like any other now"
    retention.left("b", [2], now=4.0)
    assert retention.least_first(now=5.0) == ["a", "b"]


def test_a_shared_beginning_counts_once_and_stays_until_its_last_user_goes() -> None:
    retention = PrefixRetention()
    retention.left("a", [1, 2, 3], now=0.0)
    retention.left("b", [1, 2, 4], now=0.0)
    assert retention.blocks == 4
    retention.drop("a")
    assert retention.blocks == 3
    retention.drop("b")
    retention.drop("b")
    assert retention.blocks == 0


def test_a_dropped_prefix_still_teaches_when_its_trajectory_comes() -> None:
    retention = PrefixRetention()
    for number in range(20):
        retention.left(f"t{number}", [number], now=0.0)
        retention.drop(f"t{number}")
        retention.came_back(f"t{number}", now=5.0)
    assert retention.left("next", [1], now=6.0)
    assert retention.given_up(now=65.0) == []
    assert retention.given_up(now=67.0) == ["next"], "they come within seconds here"


def test_a_trajectory_that_never_left_does_not_protect_others() -> None:
    retention = PrefixRetention()
    retention.left("lost", [1], now=0.0)
    retention.came_back("lost", now=1.0)
    retention.left("gone", [2], now=2.0)
    assert retention.given_up(now=700.0) == ["gone"]
    assert retention.least_first(now=700.0) == ["lost"]


def test_remembers_a_bounded_number() -> None:
    retention = PrefixRetention()
    for number in range(MOST_TRAJECTORIES + 1):
        retention.left(str(number), [number], now=float(number) * 1e-3)
    assert retention.given_up(now=5.0) == ["0"]
    assert retention.blocks == MOST_TRAJECTORIES


events = st.tuples(
    st.sampled_from(["left", "came_back", "turned_away", "drop", "given_up"]),
    st.sampled_from("abcd"),
    st.lists(st.integers(0, 9), unique=True, max_size=5),
    st.floats(0.0, 400.0),
)


@given(st.lists(events, max_size=60))
def test_blocks_are_those_of_the_listed_prefixes(
    played: list[tuple[str, str, list[int], float]],
) -> None:
    retention, now = PrefixRetention(), 0.0
    kept: dict[str, list[int]] = {}
    for event, name, blocks, passed_s in played:
        now += passed_s
        match event:
            case "left":
                kept.pop(name, None)
                if retention.left(name, blocks, now=now):
                    kept[name] = blocks
            case "came_back":
                retention.came_back(name, now=now)
            case "turned_away":
                retention.turned_away(name, now=now)
            case "drop":
                retention.drop(name)
                kept.pop(name, None)
            case "given_up":
                for gone in retention.given_up(now=now):
                    kept.pop(gone, None)
        assert set(retention.least_first(now=now)) == set(kept)
        assert retention.blocks == len({block for blocks in kept.values() for block in blocks})
