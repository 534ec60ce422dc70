"""Scores the forecast of a slot's idle share on traces: how wrong it is, and how often.

Prequential: at each second every forecaster observes it, then forecasts, and is scored by what
comes after; nothing is fitted on the whole trace. Outcomes are computed here, from the series. Only
moments count at which all forecasters have a forecast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.agent.idle_series import Floats, IdleSeries, generated, series_of
from benchmarks.agent.mean_forecasts import LastWindow, MeanForecaster, RecentMean
from benchmarks.testbed.trace import read_trace
from harvester.contracts.wire.leases import IdleForecast
from harvester.policy.idle_forecast import HORIZONS_S, IdleForecaster
from harvester.policy.residuals import QUANTILES

BUSY_RATIO = 0.5
"""Production's share of its slot: half is where there is most to tell."""
MEMORIES_S = (3.0, 10.0, 30.0, 120.0, 600.0, 1800.0)
"""Time constants of which the best in hindsight is the strictest opponent."""
_PER_HORIZON = 5
_TIE = 5e-5
"""Forecasts have four digits: one that is met exactly is neither above nor below."""
_BLOCKS = 20
_RESAMPLES = 1000
_OWN, _EWMA, _LAST = "own", "ewma", "last"


class Forecaster(Protocol):
    def observe(self, busy_s: float | None, *, now: float, wall_s: float) -> None: ...

    def forecasts(self, *, wall_s: float) -> tuple[IdleForecast, ...]: ...


@dataclass(slots=True)
class Scored:
    """One horizon's forecasts of each forecaster, and what came: rows of equal number."""

    at_s: list[int] = field(default_factory=list)
    outcomes: list[float] = field(default_factory=list)
    quantiles: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)

    def losses(self, name: str) -> Floats:
        """Mean pinball loss over the quantiles, of each forecast."""
        found = pinball(np.array(self.quantiles[name]), np.array(self.outcomes))
        return np.asarray(found.mean(axis=1), dtype=np.float64)


def forecast(
    traces: Sequence[Path], *, busy_ratio: float, hours: float, seed: int
) -> dict[str, Any]:
    """Verdicts by name: of each trace, and of each generated load of so many hours."""
    read = (series_of(read_trace(path), busy_ratio=busy_ratio) for path in traces)
    series = (*read, *generated(seed=seed, hours=hours))
    return {one.name: judged(one) for one in series}


def judged(series: IdleSeries) -> dict[str, Any]:
    forecasters: dict[str, Forecaster] = {
        _OWN: IdleForecaster(),
        _EWMA: MeanForecaster(RecentMean),
        _LAST: MeanForecaster(LastWindow),
        **{_fixed(m): MeanForecaster(lambda _, m=m: RecentMean(m)) for m in MEMORIES_S},  # type: ignore[misc]
    }
    return verdict(series, replayed(series.idle, forecasters))


def replayed(idle: Floats, forecasters: Mapping[str, Forecaster]) -> dict[float, Scored]:
    """Forecasts and outcomes of each horizon. The series begins at midnight."""
    total = np.concatenate(([0.0], np.cumsum(idle)))
    found = {horizon_s: Scored() for horizon_s in HORIZONS_S}
    for one in forecasters.values():
        one.observe(None, now=0.0, wall_s=0.0)
    for second in range(1, len(idle) + 1):
        now = float(second)
        for one in forecasters.values():
            one.observe(1.0 - float(idle[second - 1]), now=now, wall_s=now)
        due = [
            horizon_s
            for horizon_s in HORIZONS_S
            if second % max(1, round(horizon_s / _PER_HORIZON)) == 0
            and second + horizon_s <= len(idle)
        ]
        if not due:
            continue
        made = {
            name: {each.horizon_s: each for each in one.forecasts(wall_s=now)}
            for name, one in forecasters.items()
        }
        for horizon_s in due:
            if all(horizon_s in known for known in made.values()):
                scored, end = found[horizon_s], second + round(horizon_s)
                scored.at_s.append(second)
                scored.outcomes.append(float(total[end] - total[second]) / horizon_s)
                for name, known in made.items():
                    each = known[horizon_s]
                    row = (each.low_ratio, each.median_ratio, each.high_ratio)
                    scored.quantiles.setdefault(name, []).append(row)
    return found


def pinball(quantiles: Floats, outcomes: Floats) -> Floats:
    """Loss of each forecast (row) and quantile (column)."""
    above = outcomes[:, None] - quantiles
    return np.maximum(np.array(QUANTILES) * above, (np.array(QUANTILES) - 1) * above)


def coverage(quantiles: Floats, outcomes: Floats) -> dict[str, Any]:
    """How often outcomes lie within the outer quantiles, below the low and above the high one.

    Production is wholly idle or wholly busy in many windows, and then the right quantile is that
    very value: what meets a quantile exactly may count to either side, so that each share is a
    range, and its error the distance of its goal from the range.
    """
    low, high = quantiles[:, 0], quantiles[:, -1]
    below = _range(outcomes < low - _TIE, outcomes <= low + _TIE)
    above = _range(outcomes > high + _TIE, outcomes >= high - _TIE)
    within = _range(
        (outcomes > low + _TIE) & (outcomes < high - _TIE),
        (outcomes >= low - _TIE) & (outcomes <= high + _TIE),
    )
    goal = QUANTILES[-1] - QUANTILES[0]
    return {
        "within": _rounded(within),
        "below": _rounded(below),
        "above": _rounded(above),
        "error_points": round(100 * _outside(goal, within), 2),
        "tail_error_points": [
            round(100 * _outside(share, tail), 2)
            for share, tail in ((QUANTILES[0], below), (1 - QUANTILES[-1], above))
        ],
    }


def verdict(series: IdleSeries, found: Mapping[float, Scored]) -> dict[str, Any]:
    """The forecaster `own` beside the others; figures over horizons are plain means."""
    scored = {horizon_s: one for horizon_s, one in found.items() if len(one.at_s) >= _BLOCKS}
    if not scored:
        return {"seconds": len(series.idle), "scored": "nothing: the series is too short"}
    horizons = {f"{horizon_s:g}": _verdict(horizon_s, one) for horizon_s, one in scored.items()}
    best = {
        horizon_s: min(MEMORIES_S, key=lambda m: _loss(one, _fixed(m)))
        for horizon_s, one in scored.items()
        if _fixed(MEMORIES_S[0]) in one.quantiles
    }
    shipped = {horizon_s: _fixed(10.0) for horizon_s in best}
    return {
        "coverage_error_points": _mean(
            [one["coverage"]["error_points"] for one in horizons.values()]
        ),
        "pinball_vs_ewma": _versus(scored, dict.fromkeys(scored, _EWMA)),
        "pinball_vs_last": _versus(scored, dict.fromkeys(scored, _LAST)),
        "pinball_vs_ewma_10_s": _versus(scored, shipped) if best else None,
        "pinball_vs_best_ewma": _versus(scored, {h: _fixed(m) for h, m in best.items()})
        if best
        else None,
        "pinball_vs_ewma_interval": _interval(scored, _EWMA),
        "seconds": len(series.idle),
        "idle_ratio": round(float(series.idle.mean()), 3),
        "engine_speed": round(series.speed, 3),
        "horizons": horizons,
    }


def _verdict(horizon_s: float, one: Scored) -> dict[str, Any]:
    windows = (one.at_s[-1] - one.at_s[0]) / horizon_s + 1
    return {
        "pinball": round(_loss(one, _OWN), 5),
        "pinball_vs_ewma": _ratio(_loss(one, _OWN), _loss(one, _EWMA)),
        "pinball_vs_last": _ratio(_loss(one, _OWN), _loss(one, _LAST)),
        "coverage": coverage(np.array(one.quantiles[_OWN]), np.array(one.outcomes)),
        "coverage_of_ewma": coverage(np.array(one.quantiles[_EWMA]), np.array(one.outcomes))[
            "within"
        ],
        "forecasts": len(one.at_s),
        "chance_points": round(100 * float(np.sqrt(0.8 * 0.2 / windows)), 1),
    }


def _versus(scored: Mapping[float, Scored], rivals: Mapping[float, str]) -> float | None:
    ratios = [_ratio(_loss(one, _OWN), _loss(one, rivals[h])) for h, one in scored.items()]
    known = [ratio for ratio in ratios if ratio is not None]
    return _mean(known) if known else None


def _interval(scored: Mapping[float, Scored], rival: str) -> list[float] | None:
    """90 % of the mean ratio, over blocks of time drawn with replacement."""
    draw, ratios = np.random.default_rng(0), []
    for one in scored.values():
        ours, theirs = (
            np.array([part.sum() for part in np.array_split(one.losses(name), _BLOCKS)])
            for name in (_OWN, rival)
        )
        if not theirs.sum():
            continue
        chosen = draw.integers(_BLOCKS, size=(_RESAMPLES, _BLOCKS))
        ratios.append(ours[chosen].sum(axis=1) / np.maximum(theirs[chosen].sum(axis=1), 1e-12))
    if not ratios:
        return None
    low, high = np.quantile(np.mean(ratios, axis=0), (0.05, 0.95))
    return [round(float(low), 3), round(float(high), 3)]


def _loss(one: Scored, name: str) -> float:
    return float(one.losses(name).mean())


def _ratio(ours: float, theirs: float) -> float | None:
    """None where the other made no error at all: nothing was to be forecast."""
    return round(ours / theirs, 3) if theirs > 0 else None


def _fixed(memory_s: float) -> str:
    return f"ewma of {memory_s:g} s"


def _range(strict: Any, inclusive: Any) -> tuple[float, float]:
    return float(np.mean(strict)), float(np.mean(inclusive))


def _outside(goal: float, found: tuple[float, float]) -> float:
    return max(0.0, found[0] - goal, goal - found[1])


def _rounded(found: tuple[float, float]) -> list[float]:
    return [round(one, 4) for one in found]


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 3)
