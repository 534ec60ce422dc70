"""How likely a trajectory comes back."""

from hypothesis import given
from hypothesis import strategies as st

from coserve.guest.prefix_retention import ReturnTimes


def test_knows_nothing_at_first() -> None:
    times = ReturnTimes()
    assert times.chance(0.0) == 0.5
    assert times.patience_s == 600.0


def test_learns_the_share_that_comes_back_and_when() -> None:
    times = ReturnTimes()
    for second in range(1, 31):
        times.came_back(float(second))
    for _ in range(10):
        times.stayed_away()
    assert 0.7 < times.chance(0.0) < 0.8
    assert 0.3 < times.chance(25.0) < 0.4, "five of thirty are still to come, and ten never will"
    assert times.chance(30.0) < 0.05
    assert times.patience_s == 120.0


def test_an_overdue_trajectory_counts_as_gone_until_it_returns() -> None:
    times = ReturnTimes()
    assert not times.overdue(500.0), "nothing is known"
    times.came_back(2.0)
    assert not times.overdue(2.0)
    assert times.overdue(2.1)
    assert times.chance(1.0, overdue=9) < 0.2 < times.chance(1.0)
    times.came_back(30.0)
    assert not times.overdue(2.1)


def test_follows_another_job() -> None:
    times = ReturnTimes()
    for _ in range(300):
        times.stayed_away()
    assert times.chance(0.0) < 0.01
    for _ in range(256):
        times.came_back(1.0)
    assert times.chance(0.0) > 0.99


@given(
    st.lists(st.floats(0.0, 1e4) | st.just(float("inf")), max_size=300),
    st.floats(0.0, 1e4),
    st.floats(0.0, 1e4),
)
def test_the_longer_away_the_less_likely(
    absences: list[float], away_s: float, more_s: float
) -> None:
    times = ReturnTimes()
    for absence_s in absences:
        times.came_back(absence_s)
    assert 0.0 < times.chance(away_s + more_s) <= times.chance(away_s) < 1.0
    assert 60.0 <= times.patience_s <= 3600.0
