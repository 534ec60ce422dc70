"""Forecast of the share of the next seconds to minutes in which one slot's production is idle.

    expert     expects a share: a recent mean, or what this phase of the day, of the hour or of five
               minutes had on average
    quantiles  this share + what outcomes were above such a share before (`residuals`)
    forecast   the experts' quantiles, mixed and calibrated (`expert_mixture`)

It learns from the slot's own history alone, each outcome once its window has passed. Time that was
not observed is no idleness: a window with a gap teaches nothing, and without recent readings there
is no forecast. Memory is bounded, and a beat costs the same whatever was seen. Promises nothing,
and reads no clock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import msgspec

from harvester.contracts.wire.leases import IdleForecast
from harvester.policy.expert_mixture import ExpertMixture
from harvester.policy.residuals import Residuals

HORIZONS_S = (10.0, 30.0, 120.0)
"""A lease's duration, a turn, and a trajectory of some turns. A longer horizon could not be
calibrated: an hour of history has 30 times two minutes, and 12 times five."""

_READING_S = 1.0
_BEATS_APART_S = 5.0
"""Counters that moved between beats further apart say too little of when production was busy."""
_MEMORIES_S = (3.0, 10.0, 60.0, 300.0, 3600.0)
"""Time constants of the recent means: from one request to a load that does not change, each about
five times the one before, so that a mixture of two has any memory between them."""
_LEAST_MEMORY_RATIO = 0.1
"""Shortest memory, as a share of the horizon: what passes sooner than that hardly moves it."""
_PRESENT = 1
"""Place of the mean that must know the present, its time constant is 10 s."""
_KNOWN_RATIO = 0.5
"""Share of that mean's memory that must have been observed: the last 7 s after a long gap."""
_SEASONS = ((86_400.0, 48), (3_600.0, 60), (300.0, 30))
"""Period in s and number of phases. People live by the day; timers fire at the same minute of each
hour, or after each one, two, five or ten minutes, and their peaks last for tens of seconds."""
_SEASON_VISITS = 5.0
"""Visits of a phase that its mean rests on: a working week for the day's."""
_EXAMPLES = 5
"""Outcomes per horizon's length. More would overlap so much that they teach nothing."""
_LEAST_OUTCOMES = 10
"""Two lengths of the horizon: no forecast rests on one good or bad moment."""
_SEEN_RATIO = 0.9
"""Share of a window that must have been observed for its outcome to count."""


class SeasonProfile(msgspec.Struct, kw_only=True):
    """Mean outcome of each phase, and how many outcomes it rests on."""

    means: list[float]
    counts: list[float]


class ForecastState(msgspec.Struct, kw_only=True):
    """The part that takes days to learn and so outlives the agent; the rest is relearned in
    minutes."""

    profiles: list[list[SeasonProfile]] = []
    """Profiles by horizon and season."""


@dataclass(frozen=True, slots=True)
class _Example:
    """A forecast that waits for its outcome."""

    begun_s: float
    wall_s: float
    idle_s: float
    known_s: float
    expectations: tuple[float | None, ...]
    predictions: tuple[tuple[float, ...] | None, ...]
    mixed: tuple[float, ...]


class _Horizon:
    """One horizon's experts: the recent means first, then the seasons."""

    def __init__(self, horizon_s: float, profiles: list[SeasonProfile]) -> None:
        self.horizon_s = horizon_s
        self.profiles = profiles
        least_s = _LEAST_MEMORY_RATIO * horizon_s
        self._skipped = sum(memory_s < least_s for memory_s in _MEMORIES_S)
        means = len(_MEMORIES_S) - self._skipped
        experts = means + len(_SEASONS)
        self._residuals = tuple(Residuals(overlap=_EXAMPLES) for _ in range(experts))
        self._mixture = ExpertMixture(experts, trusted=means)
        self._waiting: deque[_Example] = deque()
        self._outcomes = 0

    def forecast(self, means: Sequence[float], *, wall_s: float) -> IdleForecast | None:
        if self._outcomes < _LEAST_OUTCOMES:
            return None
        _, _, mixed = self._mix(means, wall_s)
        low, median, high = (round(one, 4) for one in self._mixture.calibrated(mixed))
        return IdleForecast(
            horizon_s=self.horizon_s, low_ratio=low, median_ratio=median, high_ratio=high
        )

    def observe(
        self,
        means: Sequence[float] | None,
        *,
        idle_s: float,
        known_s: float,
        now: float,
        wall_s: float,
    ) -> None:
        """`means` are None while the present is not known; the totals are since ever."""
        waiting = self._waiting
        while waiting and now - waiting[0].begun_s >= self.horizon_s:
            example = waiting.popleft()
            seen_s = known_s - example.known_s
            if seen_s >= _SEEN_RATIO * (now - example.begun_s):
                self._learn(example, min(1.0, max(0.0, (idle_s - example.idle_s) / seen_s)))
        due_s = waiting[-1].begun_s + self.horizon_s / _EXAMPLES if waiting else now
        # A mean of a few seconds would teach residuals that are no longer met.
        if means is not None and now >= due_s and known_s >= self.horizon_s:
            expectations, predictions, mixed = self._mix(means, wall_s)
            waiting.append(_Example(now, wall_s, idle_s, known_s, expectations, predictions, mixed))

    def _mix(
        self, means: Sequence[float], wall_s: float
    ) -> tuple[tuple[float | None, ...], tuple[tuple[float, ...] | None, ...], tuple[float, ...]]:
        """The experts' expectations, their quantiles, and these mixed."""
        seasonal = (
            profile.means[phase] if profile.counts[phase := _phase(wall_s, season)] else None
            for season, profile in zip(_SEASONS, self.profiles, strict=True)
        )
        expectations = (*means[self._skipped :], *seasonal)
        predictions = tuple(
            None if expected is None else residuals.quantiles(expected)
            for expected, residuals in zip(expectations, self._residuals, strict=True)
        )
        return expectations, predictions, self._mixture.mix(predictions)

    def _learn(self, example: _Example, outcome: float) -> None:
        self._outcomes += 1
        self._mixture.observe(example.predictions, example.mixed, outcome)
        for expected, residuals in zip(example.expectations, self._residuals, strict=True):
            if expected is not None:
                residuals.add(outcome - expected, expected=expected)
        for season, profile in zip(_SEASONS, self.profiles, strict=True):
            period_s, phases = season
            phase = _phase(example.wall_s, season)
            visit = max(1.0, period_s / phases * _EXAMPLES / self.horizon_s)
            counted = min(profile.counts[phase] + 1, visit * _SEASON_VISITS)
            profile.means[phase] += (outcome - profile.means[phase]) / counted
            profile.counts[phase] = counted


class IdleForecaster:
    def __init__(self, left: ForecastState | None = None) -> None:
        """`left`: state of an earlier process; one of another shape is forgotten."""
        left_profiles = [] if left is None else left.profiles
        profiles = left_profiles if _fits(left_profiles) else [_profiles() for _ in HORIZONS_S]
        self._horizons = tuple(
            _Horizon(horizon_s, mine) for horizon_s, mine in zip(HORIZONS_S, profiles, strict=True)
        )
        self._sums = [0.0] * len(_MEMORIES_S)
        self._weights = [0.0] * len(_MEMORIES_S)
        self._idle_s = self._known_s = 0.0
        self._at_s: float | None = None
        self._reading_at_s = self._reading_known_s = self._reading_idle_s = 0.0

    def state(self) -> ForecastState:
        """A copy of the part that outlives the agent, to four digits."""
        return ForecastState(
            profiles=[
                [
                    SeasonProfile(
                        means=[round(mean, 4) for mean in profile.means], counts=[*profile.counts]
                    )
                    for profile in horizon.profiles
                ]
                for horizon in self._horizons
            ]
        )

    def observe(self, busy_s: float | None, *, now: float, wall_s: float) -> None:
        """`busy_s`: time that production spent on steps since the last call; None: not known.
        `wall_s`: seconds since the epoch, for seasons only; it may jump."""
        before, self._at_s = self._at_s, now
        if before is None:
            self._reading_at_s = now
            return
        elapsed_s = now - before
        if busy_s is not None and 0 < elapsed_s <= _BEATS_APART_S:
            self._reading_known_s += elapsed_s
            self._reading_idle_s += elapsed_s - min(max(busy_s, 0.0), elapsed_s)
        if now - self._reading_at_s >= _READING_S:
            self._read(now, wall_s)

    def forecasts(self, *, wall_s: float) -> tuple[IdleForecast, ...]:
        """The horizons' forecasts at the last reading; () while unknown."""
        means = self._means()
        if means is None:
            return ()
        made = (horizon.forecast(means, wall_s=wall_s) for horizon in self._horizons)
        return tuple(forecast for forecast in made if forecast is not None)

    def _read(self, now: float, wall_s: float) -> None:
        """Fold the last second in, with the share of it that was observed."""
        elapsed_s = now - self._reading_at_s
        known_ratio, idle_ratio = (
            seen_s / elapsed_s for seen_s in (self._reading_known_s, self._reading_idle_s)
        )
        for place, memory_s in enumerate(_MEMORIES_S):
            kept = exp(-elapsed_s / memory_s)
            self._sums[place] = kept * self._sums[place] + (1 - kept) * idle_ratio
            self._weights[place] = kept * self._weights[place] + (1 - kept) * known_ratio
        self._idle_s += self._reading_idle_s
        self._known_s += self._reading_known_s
        self._reading_at_s, self._reading_known_s, self._reading_idle_s = now, 0.0, 0.0
        means = self._means()
        for horizon in self._horizons:
            horizon.observe(
                means, idle_s=self._idle_s, known_s=self._known_s, now=now, wall_s=wall_s
            )

    def _means(self) -> tuple[float, ...] | None:
        if self._weights[_PRESENT] < _KNOWN_RATIO:
            return None
        return tuple(
            min(1.0, total / weight)
            for total, weight in zip(self._sums, self._weights, strict=True)
        )


def _phase(wall_s: float, season: tuple[float, int]) -> int:
    period_s, phases = season
    return min(phases - 1, int(wall_s % period_s / period_s * phases))


def _profiles() -> list[SeasonProfile]:
    return [SeasonProfile(means=[0.0] * phases, counts=[0.0] * phases) for _, phases in _SEASONS]


def _fits(profiles: list[list[SeasonProfile]]) -> bool:
    shape = [[(phases, phases) for _, phases in _SEASONS] for _ in HORIZONS_S]
    return shape == [[(len(p.means), len(p.counts)) for p in one] for one in profiles]
