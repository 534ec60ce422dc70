"""The score of forecasts can convict: narrow ones, wrong ones, and those that look ahead."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks.agent.forecast import (
    Forecaster,
    coverage,
    judged,
    pinball,
    replayed,
    verdict,
)
from benchmarks.agent.idle_series import IdleSeries, generated, idle_shares, series_of
from benchmarks.agent.mean_forecasts import LastWindow, MeanForecaster, RecentMean
from benchmarks.testbed.trace import read_trace
from harvester.contracts.wire.leases import IdleForecast
from harvester.policy.idle_forecast import HORIZONS_S, IdleForecaster

SECONDS = 1500


def _noise(seconds: int = SECONDS) -> np.ndarray:
    draw = random.Random(3)
    return np.array([draw.random() for _ in range(seconds)])


class _Fixed:
    """Forecasts the mean of what comes, and an interval of a given width around it."""

    def __init__(self, idle: np.ndarray, *, width: float) -> None:
        self._total = np.concatenate(([0.0], np.cumsum(idle)))
        self._width = width
        self._now = 0

    def observe(self, busy_s: float | None, *, now: float, wall_s: float) -> None:
        self._now = round(now)

    def forecasts(self, *, wall_s: float) -> tuple[IdleForecast, ...]:
        return tuple(map(self._forecast, HORIZONS_S))

    def _forecast(self, horizon_s: float) -> IdleForecast:
        end = min(self._now + round(horizon_s), len(self._total) - 1)
        mean = self._middle(end, horizon_s)
        low, high = mean - self._width / 2, mean + self._width / 2
        return IdleForecast(horizon_s=horizon_s, low_ratio=low, median_ratio=mean, high_ratio=high)

    def _middle(self, end: int, horizon_s: float) -> float:
        return float(self._total[end] - self._total[self._now]) / horizon_s


class _Narrow(_Fixed):
    """Right on average, and far too sure of it."""

    def _middle(self, end: int, horizon_s: float) -> float:
        return 0.5


def _verdict(own: Callable[[np.ndarray], Forecaster], idle: np.ndarray) -> dict:
    forecasters: Mapping[str, Forecaster] = {
        "own": own(idle),
        "ewma": MeanForecaster(RecentMean),
        "last": MeanForecaster(LastWindow),
    }
    return verdict(IdleSeries(name="noise", idle=idle), replayed(idle, forecasters))


def test_an_oracle_makes_no_error() -> None:
    found = _verdict(lambda idle: _Fixed(idle, width=0.0), _noise())
    assert found["pinball_vs_ewma"] == pytest.approx(0.0, abs=1e-9)
    assert found["coverage_error_points"] == 0.0


def test_too_narrow_an_interval_is_convicted() -> None:
    found = _verdict(lambda idle: _Narrow(idle, width=0.01), _noise())
    assert found["coverage_error_points"] > 40
    assert found["pinball_vs_ewma"] > 1.0


def test_too_wide_an_interval_is_convicted() -> None:
    found = _verdict(lambda idle: _Narrow(idle, width=1.0), _noise())
    assert found["coverage_error_points"] == pytest.approx(20, abs=1)
    assert found["pinball_vs_ewma"] > 2.0


def test_the_shipped_forecaster_is_within_three_points_on_noise() -> None:
    found = judged(IdleSeries(name="noise", idle=_noise(4000)))
    assert found["coverage_error_points"] < 3.0
    assert found["pinball_vs_ewma"] < 0.95
    assert found["pinball_vs_last"] < 0.85


def test_no_forecast_changes_with_what_comes_later() -> None:
    idle, cut = _noise(600), 400
    other = np.concatenate((idle[:cut], 1.0 - idle[cut:]))
    kinds = (
        IdleForecaster,
        lambda: MeanForecaster(RecentMean),
        lambda: MeanForecaster(LastWindow),
    )
    for make in kinds:
        first, second = (replayed(each, {"own": make()})[10.0] for each in (idle, other))
        seen = sum(at_s <= cut for at_s in first.at_s)
        assert seen > 100
        assert first.quantiles["own"][:seen] == second.quantiles["own"][:seen]


def test_pinball_loss_weighs_each_side_by_its_quantile() -> None:
    quantiles, outcomes = np.array([[0.2, 0.5, 0.9]]), np.array([0.6])
    assert pinball(quantiles, outcomes)[0] == pytest.approx([0.1 * 0.4, 0.5 * 0.1, 0.1 * 0.3])


def test_an_outcome_that_meets_a_quantile_counts_to_either_side() -> None:
    """Half the windows are wholly idle: 1 is the right high quantile, not a miss."""
    outcomes = np.array([1.0, 0.5] * 500)
    found = coverage(np.tile([0.5, 0.75, 1.0], (1000, 1)), outcomes)
    assert found["error_points"] == 0.0
    assert found["tail_error_points"] == [0.0, 0.0]
    found = coverage(np.tile([0.6, 0.75, 1.0], (1000, 1)), outcomes)
    assert found["tail_error_points"] == [40.0, 0.0]


def test_requests_that_overlap_count_once() -> None:
    idle = idle_shares(np.array([0.5, 1.0, 3.25]), np.array([1.0, 0.25, 0.5]), seconds=5)
    assert idle == pytest.approx([0.5, 0.5, 1.0, 0.5, 1.0])


def test_a_trace_keeps_its_engine_as_busy_as_asked(tmp_path: Path) -> None:
    draw, at_s, rows = random.Random(4), 0.0, ["t_s,input_tokens,output_tokens"]
    for _ in range(500):
        at_s += draw.expovariate(1.0)
        rows.append(f"{at_s:.3f},{draw.randrange(1, 2000)},{draw.randrange(1, 300)}")
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(rows))
    for busy_ratio in (0.2, 0.5, 0.8):
        series = series_of(read_trace(path), busy_ratio=busy_ratio)
        assert 1 - series.idle.mean() == pytest.approx(busy_ratio, abs=0.01)


def test_generated_loads_are_shares_of_seconds_and_repeat() -> None:
    first, again = (list(generated(seed=1, hours=0.2)) for _ in range(2))
    assert [one.name for one in first] == [
        *("generated: bursts", "generated: step", "generated: clumps"),
        *("generated: timer", "generated: day"),
    ]
    for one, same in zip(first, again, strict=True):
        assert one.idle.tolist() == same.idle.tolist()
        assert 0.0 <= one.idle.min() <= one.idle.max() <= 1.0
        assert 0.0 < one.idle.mean() < 1.0


def test_a_series_that_is_too_short_has_no_figure() -> None:
    found = judged(IdleSeries(name="short", idle=_noise(60)))
    assert "pinball_vs_ewma" not in found
    assert "too short" in found["scored"]
