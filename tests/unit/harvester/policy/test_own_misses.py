import random

import pytest

from harvester.policy.own_misses import believable_rate, late_rate

_SLICES_A_MINUTE = 6


def minutes(rng: random.Random, count: int, *, share: float, harm: float) -> list[list[float]]:
    """Late requests of 50 a slice under a load that swings for about a minute."""
    load, counts = 0.0, []
    for _ in range(count):
        granted = granted_late = withheld = withheld_late = 0.0
        for _ in range(_SLICES_A_MINUTE):
            load = 0.8 * load + rng.gauss(0.0, 0.6)
            late = 50 * min(1.0, 0.01 * 10**load)
            if rng.random() < share:
                withheld, withheld_late = withheld + 50, withheld_late + late
            else:
                granted, granted_late = granted + 50, granted_late + min(50, late + 50 * harm)
        counts.append([granted, granted_late, withheld, withheld_late])
    return [list(column) for column in zip(*counts, strict=True)]


def bound(columns: list[list[float]]) -> float:
    return believable_rate(
        *columns, [_SLICES_A_MINUTE] * len(columns[0]), shares=[0.0] * len(columns[0])
    )


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5])
@pytest.mark.parametrize("count", [5, 60])
def test_swings_of_load_stay_within_what_is_believed_of_production(
    count: int, share: float
) -> None:
    rng = random.Random(1)
    exceeded = 0
    for _ in range(300):
        granted, late, *alone = minutes(rng, count, share=share, harm=0.0)
        exceeded += sum(late) / max(1.0, sum(granted)) > bound([granted, late, *alone]) > 0.0
    assert exceeded <= 6


def test_a_window_of_few_minutes_believes_more_than_they_show() -> None:
    rng, exceeded = random.Random(1), 0
    for trial in range(1800):
        granted, late, *alone = minutes(rng, 3 + trial % 3, share=0.5, harm=0.0)
        exceeded += sum(late) / max(1.0, sum(granted)) > bound([granted, late, *alone]) > 0.0
    assert exceeded <= 3


def test_harm_that_lasts_widens_nothing() -> None:
    rng = random.Random(2)
    harmless = bound(minutes(rng, 60, share=0.25, harm=0.0))
    assert bound(minutes(rng, 60, share=0.25, harm=0.25)) < harmless + 0.1


def test_two_minutes_say_nothing_against_production() -> None:
    assert bound([[270.0, 270.0], [200.0, 200.0], [30.0, 30.0], [0.0, 0.0]]) == 1.0


def test_without_withheld_requests_nothing_speaks_for_production() -> None:
    assert bound([[300.0], [100.0], [0.0], [0.0]]) == 0.0


@pytest.mark.parametrize("busy_share", [0.05, 0.5])
def test_minutes_count_alike_whatever_their_share_withheld(busy_share: float) -> None:
    """Half an hour without a late request, then one in which production alone misses 15 %."""
    rng, exceeded = random.Random(3), 0
    shares = [0.25] * 30 + [busy_share] * 30
    for _ in range(100):
        columns: list[list[float]] = [[], [], [], []]
        for minute, share in enumerate(shares):
            alone = 10.0 * sum(rng.random() < share for _ in range(30))
            late = 0.0 if minute < 30 else 0.15
            granted, withheld = 300.0 - alone, alone * (1.0 - share) / share
            for column, count in zip(
                columns, (granted, late * granted, withheld, late * withheld), strict=True
            ):
                column.append(count)
        own = believable_rate(*columns, [30.0] * 60, shares=shares)
        assert own < 0.15
        exceeded += late_rate(*columns[:2], shares) > own
    assert exceeded <= 1


def test_an_overload_whose_few_long_slices_were_all_granted_is_believed_of_production() -> None:
    quiet, overload = [184.0, 0.0, 80.0, 0.0], [264.0, 200.0, 0.0, 0.0]
    columns = [list(column) for column in zip(*[quiet] * 40, *[overload] * 20, strict=True)]
    granted_rate = sum(columns[1]) / sum(columns[0])
    assert believable_rate(*columns, [60.0 / 43.0] * 60, shares=[0.0] * 60) > granted_rate
    # Short slices would have been withheld in all of those minutes, without a late request.
    columns[2] = [80.0] * 60
    assert believable_rate(*columns, [30.0] * 60, shares=[0.0] * 60) < granted_rate / 2


def test_a_miss_whose_request_counted_a_minute_before_is_no_error() -> None:
    """Its minute has a late request and no other."""
    columns = [[40.0, 40.0, 40.0, 0.0], [1.0, 0.0, 0.0, 1.0], [4.0] * 3 + [0.0], [0.0] * 4]
    assert 0.0 <= believable_rate(*columns, [30.0] * 4, shares=[0.0] * 4) <= 1.0
