"""The forecast of a slot's idle share: ordered, bounded, calibrated, and silent about what it did
not see."""

import math
import random
import sys
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.wire.leases import IdleForecast
from harvester.policy.idle_forecast import (
    HORIZONS_S,
    ForecastState,
    IdleForecaster,
    SeasonProfile,
)

DAY_S = 86_400.0


def _forecaster(idle: Iterator[float] | list[float], *, wall_s: float = 0.0) -> IdleForecaster:
    """A forecaster that has seen these seconds."""
    made = IdleForecaster()
    made.observe(None, now=0.0, wall_s=wall_s)
    for second, share in enumerate(idle, 1):
        made.observe(1.0 - share, now=float(second), wall_s=wall_s + second)
    return made


def _of(forecasts: tuple[IdleForecast, ...], horizon_s: float) -> IdleForecast:
    (found,) = (each for each in forecasts if each.horizon_s == horizon_s)
    return found


def _bursts(draw: random.Random, seconds: int) -> Iterator[float]:
    """Seconds that are wholly idle or busy, in spells of a minute and of 20 s."""
    busy = False
    for _ in range(seconds):
        busy ^= draw.random() < (1 / 20 if busy else 1 / 60)
        yield 0.0 if busy else 1.0


def _noise(draw: random.Random, seconds: int) -> Iterator[float]:
    for _ in range(seconds):
        yield draw.random()


def _step(draw: random.Random, seconds: int) -> Iterator[float]:
    for second in range(seconds):
        yield min(1.0, max(0.0, draw.gauss(0.8 if second < seconds / 2 else 0.3, 0.2)))


def _swing(draw: random.Random, seconds: int) -> Iterator[float]:
    """A mean that swings by 0.4 within an hour."""
    for second in range(seconds):
        mean = 0.5 + 0.4 * math.sin(2 * math.pi * second / 3600)
        yield min(1.0, max(0.0, draw.gauss(mean, 0.2)))


@pytest.mark.parametrize("load", [_bursts, _noise, _step, _swing])
def test_the_central_interval_holds_its_share_of_outcomes_on_any_load(load) -> None:
    seconds, horizon_s = 3000, 10
    idle = list(load(random.Random(load.__name__), seconds))
    forecaster = IdleForecaster()
    forecaster.observe(None, now=0.0, wall_s=0.0)
    below = above = met_low = met_high = count = 0
    for second in range(1, seconds - horizon_s):
        forecaster.observe(1.0 - idle[second - 1], now=float(second), wall_s=float(second))
        if second % 2 or second < 300:
            continue
        found = _of(forecaster.forecasts(wall_s=float(second)), horizon_s)
        outcome = round(sum(idle[second : second + horizon_s]) / horizon_s, 4)
        count += 1
        below += outcome < found.low_ratio
        above += outcome > found.high_ratio
        met_low += outcome <= found.low_ratio
        met_high += outcome >= found.high_ratio
    # An outcome that meets a quantile counts to either side: whole idle windows are frequent.
    assert below / count - 0.03 <= 0.1 <= met_low / count + 0.03
    assert above / count - 0.03 <= 0.1 <= met_high / count + 0.03


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 1.0), st.integers(1, 40), st.booleans()), min_size=20, max_size=40
    ),
    st.floats(0.0, 2e9),
)
def test_quantiles_are_ordered_and_possible_whatever_was_seen(
    spells: list[tuple[float, int, bool]], wall_s: float
) -> None:
    forecaster, now = IdleForecaster(), 0.0
    for idle, lasts, known in spells:
        for _ in range(lasts):
            now += 1.0
            forecaster.observe(1.0 - idle if known else None, now=now, wall_s=wall_s + now)
        for each in forecaster.forecasts(wall_s=wall_s + now):
            assert 0.0 <= each.low_ratio <= each.median_ratio <= each.high_ratio <= 1.0


def test_nothing_is_forecast_before_enough_was_seen() -> None:
    assert _forecaster([]).forecasts(wall_s=0.0) == ()
    assert _forecaster([1.0] * 30).forecasts(wall_s=30.0) == ()
    assert [each.horizon_s for each in _forecaster([1.0] * 100).forecasts(wall_s=0.0)] == [10.0]
    assert len(_forecaster([1.0] * 600).forecasts(wall_s=0.0)) == len(HORIZONS_S)


def test_a_load_that_never_changes_is_forecast_exactly() -> None:
    for share in (0.0, 0.4, 1.0):
        found = _of(_forecaster([share] * 1200).forecasts(wall_s=1200.0), 30.0)
        assert (found.low_ratio, found.high_ratio) == pytest.approx((share, share), abs=0.01)


def test_time_that_was_not_observed_is_no_idleness() -> None:
    forecaster = _forecaster([0.2] * 1200)
    for second in range(1200, 1300):
        forecaster.observe(None, now=float(second), wall_s=float(second))
    assert forecaster.forecasts(wall_s=1300.0) == ()
    for second in range(1300, 1320):
        forecaster.observe(0.8, now=float(second), wall_s=float(second))
    found = _of(forecaster.forecasts(wall_s=1320.0), 30.0)
    assert found.high_ratio < 0.3, "the gap taught nothing"


def test_a_window_with_a_gap_teaches_nothing() -> None:
    steady, gapped = _forecaster([0.5] * 600), IdleForecaster()
    gapped.observe(None, now=0.0, wall_s=0.0)
    for second in range(1, 600):
        hidden = second % 10 < 3
        gapped.observe(None if hidden else 0.5, now=float(second), wall_s=float(second))
    assert steady.forecasts(wall_s=600.0)
    assert gapped.forecasts(wall_s=600.0) == ()


def test_beats_far_apart_tell_nothing() -> None:
    forecaster = IdleForecaster()
    for beat in range(200):
        forecaster.observe(0.0, now=60.0 * beat, wall_s=0.0)
    assert forecaster.forecasts(wall_s=0.0) == ()


def test_more_busy_time_than_passed_counts_as_busy_and_less_than_none_as_idle() -> None:
    for busy_s, idle in ((5.0, 0.0), (-5.0, 1.0)):
        forecaster = IdleForecaster()
        for second in range(600):
            forecaster.observe(busy_s, now=float(second), wall_s=0.0)
        assert _of(forecaster.forecasts(wall_s=0.0), 10.0).median_ratio == idle


def test_beats_of_a_tenth_of_a_second_give_the_forecast_of_whole_seconds() -> None:
    fine = IdleForecaster()
    fine.observe(None, now=0.0, wall_s=0.0)
    for beat in range(1, 6001):
        fine.observe(0.03, now=beat / 10, wall_s=beat / 10)
    found = _of(fine.forecasts(wall_s=600.0), 30.0)
    assert found.median_ratio == pytest.approx(0.7, abs=0.01)


def test_a_timer_that_fires_every_five_minutes_is_expected() -> None:
    idle = [0.0 if second % 300 < 10 else 1.0 for second in range(3600)]
    forecaster = _forecaster(idle)
    quiet = _of(forecaster.forecasts(wall_s=3750.0), 10.0)
    due = _of(forecaster.forecasts(wall_s=3600.0), 10.0)
    assert quiet.median_ratio > 0.9
    assert due.median_ratio < 0.7


def test_learned_seasons_outlive_the_agent() -> None:
    idle = [0.0 if second % 300 < 10 else 1.0 for second in range(3600)]
    left = msgspec.json.decode(msgspec.json.encode(_forecaster(idle).state()), type=ForecastState)
    again = IdleForecaster(left)
    again.observe(None, now=0.0, wall_s=0.0)
    assert again.forecasts(wall_s=0.0) == (), "but not what it expects now"
    assert again.state() == left
    assert len(msgspec.json.encode(left)) < 10_000


@pytest.mark.parametrize(
    "profiles",
    [[], [[]], [[SeasonProfile(means=[0.1], counts=[1.0])] * 3] * 3],
)
def test_a_state_of_another_shape_is_forgotten(profiles: list[list[SeasonProfile]]) -> None:
    assert IdleForecaster(ForecastState(profiles=profiles)).state() == IdleForecaster().state()


def test_a_wall_clock_that_jumps_changes_no_bounds() -> None:
    draw = random.Random(1)
    forecaster = IdleForecaster()
    for second in range(2000):
        wall_s = draw.uniform(-DAY_S, 1e10)
        forecaster.observe(draw.random(), now=float(second), wall_s=wall_s)
    assert len(forecaster.forecasts(wall_s=-1.0)) == len(HORIZONS_S)


def test_memory_does_not_grow_with_time() -> None:
    draw = random.Random(2)
    forecaster = _forecaster(_noise(draw, 1500))
    grown = _size(forecaster)
    for second in range(1500, 3000):
        forecaster.observe(draw.random(), now=float(second), wall_s=float(second))
    assert _size(forecaster) <= 1.3 * grown < 1 << 20


def _size(thing: object, seen: set[int] | None = None) -> int:
    """Bytes of everything that it holds."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    held: list[object] = []
    if isinstance(thing, dict):
        held += thing.values()
    elif not isinstance(thing, str | bytes) and hasattr(thing, "__iter__"):
        held += list(thing) if not hasattr(thing, "typecode") else []
    held += vars(thing).values() if hasattr(thing, "__dict__") else []
    for name in getattr(type(thing), "__slots__", ()):
        held.append(getattr(thing, name, None))
    held += [getattr(thing, name) for name in getattr(thing, "__struct_fields__", ())]
    return sys.getsizeof(thing) + sum(_size(each, seen) for each in held)
