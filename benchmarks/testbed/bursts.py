"""The project's own production load, for where no trace is given.

Arrivals are a Markov-modulated Poisson process: a calm state and a busy one with `burst_ratio`
times its rate, exponential stays in each. Prompt and output lengths are log-normal: most short, a
few very long. Seeded; the same seed is the same trace.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.testbed.trace import Trace, read_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    rate: float = 4.0
    """Mean requests per second over both states."""
    burst_ratio: float = 3.0
    calm_s: float = 12.0
    """Mean stay in the calm state."""
    burst_s: float = 3.0
    input_median_tokens: float = 700.0
    input_sigma: float = 1.0
    output_median_tokens: float = 90.0
    output_sigma: float = 0.9
    input_max_tokens: int = 16_000
    output_max_tokens: int = 2_000

    def __post_init__(self) -> None:
        if min(self.rate, self.calm_s, self.burst_s) <= 0 or self.burst_ratio < 1:
            raise ValueError("rates and stays must be above 0, burst_ratio at least 1")


_GENERATED_S = 3600.0


def trace_of(path: Path | None, *, seed: int) -> Trace:
    """The recorded trace; None: an hour of generated bursts."""
    if path is None:
        return generated_trace(Bursts(), duration_s=_GENERATED_S, seed=seed)
    return read_trace(path)


def generated_trace(bursts: Bursts, *, duration_s: float, seed: int) -> Trace:
    """A trace of `duration_s` seconds, named after its seed."""
    rng = np.random.default_rng(seed)
    t_s = _arrivals(bursts, duration_s, rng)
    return Trace(
        name=f"generated bursts, seed {seed}",
        t_s=t_s - t_s[0],
        input_tokens=_lengths(
            rng, len(t_s), bursts.input_median_tokens, bursts.input_sigma, bursts.input_max_tokens
        ),
        output_tokens=_lengths(
            rng,
            len(t_s),
            bursts.output_median_tokens,
            bursts.output_sigma,
            bursts.output_max_tokens,
        ),
    )


def _arrivals(bursts: Bursts, duration_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    mean_ratio = (bursts.calm_s + bursts.burst_ratio * bursts.burst_s) / (
        bursts.calm_s + bursts.burst_s
    )
    calm_rate = bursts.rate / mean_ratio
    pieces: list[NDArray[np.float64]] = []
    now, busy = 0.0, False
    while now < duration_s or sum(map(len, pieces)) < 2:
        stay_s = float(rng.exponential(bursts.burst_s if busy else bursts.calm_s))
        rate = calm_rate * (bursts.burst_ratio if busy else 1.0)
        pieces.append(np.sort(now + stay_s * rng.random(int(rng.poisson(rate * stay_s)))))
        now, busy = now + stay_s, not busy
    t_s = np.concatenate(pieces)
    inside = t_s[t_s < duration_s]
    return inside if len(inside) >= 2 else t_s


def _lengths(
    rng: np.random.Generator, count: int, median: float, sigma: float, most: int
) -> NDArray[np.int64]:
    drawn = median * np.exp(sigma * rng.standard_normal(count))
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)
