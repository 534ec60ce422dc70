"""Chooses the replayed parts of a trace, their speed and their token scale.

The excerpts chosen are those most like their trace, so that no round is measured on a lull or on
the one great burst. Small models get smaller requests; order, bursts and tails stay. Pure.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from benchmarks.testbed.trace import Arrival, Trace
from harvester.contracts.errors import ConfigError

_PLACES = 256
"""Excerpts compared per trace, evenly spaced; ten requests an excerpt can fall between two."""
_BINS = 20
"""Time bins per excerpt in which burstiness is measured."""
_BURSTINESS_WEIGHT = 0.25
"""Weight of burstiness against the rate: load decides the amount to harvest, bursts the
difficulty."""
_REGULAR = 0.25
"""Added to variance over mean (1 for a Poisson process): far below that, less does not count."""
ARRIVALS_MAX = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScale:
    """Scale from the trace's token counts to those of a small model."""

    input_scale: float = 1.0
    output_scale: float = 1.0
    input_min: int = 1
    input_max: int = 1_000_000
    output_min: int = 1
    output_max: int = 1_000_000

    def __post_init__(self) -> None:
        if not (self.input_scale > 0 and self.output_scale > 0):
            raise ValueError("token scales must be above 0")
        if not (1 <= self.input_min <= self.input_max and 1 <= self.output_min <= self.output_max):
            raise ValueError("token limits must be 1 <= min <= max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A stretch of a trace. `speed` is how many trace seconds pass in one second of replay."""

    trace: str
    arrivals: tuple[Arrival, ...]
    duration_s: float
    start_s: float
    """Start of the excerpt, in the trace's own seconds."""
    speed: float = 1.0

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.arrivals) / self.duration_s

    def endless(self) -> Iterator[Arrival]:
        """The arrivals, lap after lap; a later lap's requests have indices of their own."""
        if not self.arrivals:
            return
        for lap in itertools.count():
            for arrival in self.arrivals:
                yield replace(
                    arrival,
                    index=arrival.index + lap * len(self.arrivals),
                    t_s=arrival.t_s + lap * self.duration_s,
                )

    def until(self, seconds: float) -> tuple[Arrival, ...]:
        """Arrivals in the first `seconds`, over as many laps as needed."""
        return tuple(itertools.takewhile(lambda arrival: arrival.t_s < seconds, self.endless()))

    def scaled(self, *, rate: float) -> "Excerpt":
        """The same requests at `rate` per second: time is stretched, the excerpt with it."""
        factor = self.rate / rate
        return replace(
            self,
            arrivals=tuple(replace(a, t_s=a.t_s * factor) for a in self.arrivals),
            duration_s=self.duration_s * factor,
            speed=self.speed / factor,
        )

    def evenly(self) -> "Excerpt":
        """The same requests at equal distances, so that each is served for itself."""
        return replace(
            self,
            arrivals=tuple(
                replace(arrival, t_s=place / self.rate)
                for place, arrival in enumerate(self.arrivals)
            ),
        )

    def sized(self, scale: TokenScale) -> "Excerpt":
        """The same moments, with token counts scaled and then clipped."""
        return replace(
            self,
            arrivals=tuple(
                replace(
                    a,
                    input_tokens=_clipped(
                        a.input_tokens * scale.input_scale, scale.input_min, scale.input_max
                    ),
                    output_tokens=_clipped(
                        a.output_tokens * scale.output_scale, scale.output_min, scale.output_max
                    ),
                )
                for a in self.arrivals
            ),
        )


def excerpt_of(trace: Trace, *, duration_s: float, rate: float) -> Excerpt:
    """The excerpt that lasts `duration_s` when the whole trace is replayed at `rate` per second.

    Its own rate is as near to `rate` as the trace has an excerpt; a trace too short begins again.
    Raises ConfigError where the trace has no such excerpt with a request in it.
    """
    return excerpts_of(trace, count=1, duration_s=duration_s, rate=rate)[0]


def mean_rate(excerpts: Sequence[Excerpt]) -> float:
    """Requests per second over excerpts of equal length."""
    return fmean(excerpt.rate for excerpt in excerpts)


def excerpts_of(trace: Trace, *, count: int, duration_s: float, rate: float) -> tuple[Excerpt, ...]:
    """`count` disjoint excerpts, each chosen as by `excerpt_of`, in the trace's order.

    If the trace has fewer disjoint ones, the best are repeated.
    """
    speed = rate / trace.rate
    length_s = duration_s * speed
    times, rows = _long_enough(trace, length_s, count=count)
    excerpts = tuple(
        Excerpt(
            trace=trace.name,
            arrivals=_arrivals(trace, times, rows, start_s=start_s, length_s=length_s, speed=speed),
            duration_s=duration_s,
            start_s=start_s,
            speed=speed,
        )
        for start_s in _most_typical(times, length_s=length_s, rate=trace.rate, count=count)
    )
    if not excerpts:
        raise ConfigError(f"trace {trace.name}: no request in any {length_s:g} s of it")
    return excerpts


def _arrivals(
    trace: Trace,
    times: NDArray[np.float64],
    rows: NDArray[np.int64],
    *,
    start_s: float,
    length_s: float,
    speed: float,
) -> tuple[Arrival, ...]:
    first, last = np.searchsorted(times, (start_s, start_s + length_s))
    chosen = rows[first:last]
    columns = zip(
        ((times[first:last] - start_s) / speed).tolist(),
        trace.input_tokens[chosen].tolist(),
        trace.output_tokens[chosen].tolist(),
        strict=True,
    )
    return tuple(
        Arrival(index=index, t_s=t_s, input_tokens=given, output_tokens=output)
        for index, (t_s, given, output) in enumerate(columns)
    )


def _long_enough(
    trace: Trace, length_s: float, *, count: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Times and row numbers of the trace, repeated until `count` excerpts fit into it."""
    expected = count * length_s * trace.rate
    if expected > ARRIVALS_MAX:
        raise ConfigError(
            f"a replay of about {expected:.0f} requests is too many (at most {ARRIVALS_MAX}); "
            "replay more slowly or for a shorter time"
        )
    period_s = trace.duration_s + 1.0 / trace.rate
    needed_s = count * length_s
    repeats = 1 if needed_s <= trace.duration_s else max(1, int(np.ceil(needed_s / period_s)))
    times = np.concatenate([trace.t_s + turn * period_s for turn in range(repeats)])
    return times, np.tile(np.arange(len(trace.t_s), dtype=np.int64), repeats)


def _most_typical(
    times: NDArray[np.float64], *, length_s: float, rate: float, count: int
) -> list[float]:
    """Starts of the excerpts nearest to the whole in rate and in variance over mean of their bins.

    Distances are of logarithms, so that half and double weigh the same; the earlier wins a tie.
    """
    latest_s = max(0.0, float(times[-1]) - length_s)
    starts = np.linspace(0.0, latest_s, _PLACES) if latest_s > 0 else np.zeros(1)
    edges = starts[:, None] + np.linspace(0.0, length_s, _BINS + 1)[None, :]
    counts = np.diff(np.searchsorted(times, edges), axis=1).astype(float)
    rates = counts.sum(axis=1) / length_s
    bursts = _log_ratio(_REGULAR + _dispersion(counts), _REGULAR + _whole(times, length_s))
    far = _log_ratio(rates, rate) + _BURSTINESS_WEIGHT * bursts
    chosen: list[float] = []
    for place in np.argsort(far, kind="stable"):
        start_s = float(starts[place])
        if rates[place] and all(abs(start_s - other_s) >= length_s for other_s in chosen):
            chosen.append(start_s)
        if len(chosen) == count:
            break
    return sorted(itertools.islice(itertools.cycle(chosen), count))


def _whole(times: NDArray[np.float64], length_s: float) -> NDArray[np.float64]:
    """Dispersion of the whole trace in bins of the same width."""
    width_s = length_s / _BINS
    edges = np.arange(0.0, float(times[-1]) + width_s, width_s)
    return _dispersion(np.diff(np.searchsorted(times, edges)).astype(float)[None, :])


def _dispersion(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    mean = counts.mean(axis=1)
    return np.asarray(counts.var(axis=1) / np.maximum(mean, 1e-9))


def _log_ratio(
    value: NDArray[np.float64], target: float | NDArray[np.float64]
) -> NDArray[np.float64]:
    return np.asarray(np.abs(np.log((value + 1e-3) / (np.asarray(target) + 1e-3))))


def _clipped(tokens: float, least: int, most: int) -> int:
    return max(least, min(most, round(tokens)))
