"""The idle share of each second of a slot: from a trace of requests, or generated.

A request keeps its engine busy from its arrival until its last token, whatever runs beside it. The
engine's speed is what makes production as busy as asked; it is found from the whole trace, before
any forecast, and printed beside every figure.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.testbed.trace import Trace

PREFILL_S = 1e-4
DECODE_S = 2e-2
"""Per token at speed 1: 10,000 prompt tokens a second and 50 tokens a second for each request."""
_SPEEDS = (1e-4, 1e6)
_HALVINGS = 50

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSeries:
    name: str
    idle: Floats
    """Share of each second, in [0, 1]."""
    speed: float = 1.0
    """How much faster the engine is than one of speed 1."""


def series_of(trace: Trace, *, busy_ratio: float) -> IdleSeries:
    """The slot of an engine that the trace keeps busy for this share of its time."""
    work_s = PREFILL_S * trace.input_tokens + DECODE_S * trace.output_tokens
    seconds = max(1, int(trace.duration_s))
    slow, fast = _SPEEDS
    for _ in range(_HALVINGS):
        speed = math.sqrt(slow * fast)
        idle = idle_shares(trace.t_s, work_s / speed, seconds=seconds)
        slow, fast = (slow, speed) if 1 - idle.mean() < busy_ratio else (speed, fast)
    return IdleSeries(name=trace.name, idle=idle, speed=speed)


def idle_shares(begin_s: Floats, lasts_s: Floats, *, seconds: int) -> Floats:
    """Share of each second in which no request runs; `begin_s` never falls."""
    ends_s = np.maximum.accumulate(begin_s + lasts_s)
    busy_from = np.maximum(begin_s, np.concatenate(([0.0], ends_s[:-1])))
    edges = np.concatenate(
        ([0.0], np.ravel(np.column_stack((busy_from, np.maximum(ends_s, busy_from)))))
    )
    spent = np.where(np.arange(len(edges)) % 2 == 0, np.diff(edges, prepend=0.0), 0.0)
    busy_until = np.interp(np.arange(seconds + 1.0), edges, np.cumsum(spent))
    return np.clip(1.0 - np.diff(busy_until), 0.0, 1.0)


def generated(*, seed: int, hours: float) -> Iterator[IdleSeries]:
    """Loads that no constant was chosen by. The day has 12 times as many hours."""
    for name, (make, factor) in _GENERATORS.items():
        seconds = max(600, round(3600 * hours * factor))
        draw = random.Random(f"{name} {seed}")
        arrivals = list(make(draw, seconds))
        begin_s = np.array([at_s for at_s, _ in arrivals])
        lasts_s = np.array([lasts for _, lasts in arrivals])
        order = np.argsort(begin_s, kind="stable")
        idle = idle_shares(begin_s[order], lasts_s[order], seconds=seconds)
        yield IdleSeries(name=f"generated: {name}", idle=idle)


Arrivals = Iterator[tuple[float, float]]
"""When each request comes and how long it lasts, in s."""


def _day(draw: random.Random, seconds: int) -> Arrivals:
    """Poisson arrivals, 19 times as many at noon as at midnight."""
    at_s = draw.expovariate(0.6)
    while at_s < seconds:
        if draw.random() < 0.5 - 0.45 * math.cos(2 * math.pi * at_s / 86_400):
            yield at_s, draw.expovariate(0.5)
        at_s += draw.expovariate(0.6)


def _bursts(draw: random.Random, seconds: int) -> Arrivals:
    """Poisson arrivals whose rate changes between two values (Markov-modulated)."""
    at_s, bursting, until_s = 0.0, False, 0.0
    while at_s < seconds:
        at_s += draw.expovariate(3.0 if bursting else 0.02)
        if at_s < until_s:
            yield at_s, draw.expovariate(1.0)
        else:
            at_s, bursting = until_s, not bursting
            until_s += draw.expovariate(1 / 20 if bursting else 1 / 60)


def _step(draw: random.Random, seconds: int) -> Arrivals:
    """Poisson arrivals, six times as many in the second half."""
    at_s = 0.0
    while at_s < seconds:
        at_s += draw.expovariate(0.1 if at_s < seconds / 2 else 0.6)
        yield at_s, draw.expovariate(0.5)


def _clumps(draw: random.Random, seconds: int) -> Arrivals:
    """Gamma-distributed times between arrivals, of coefficient of variation 13."""
    at_s, shape = 0.0, 1 / 13**2
    while at_s < seconds:
        at_s += draw.gammavariate(shape, 1 / shape)
        yield at_s, draw.expovariate(1.0)


def _timer(draw: random.Random, seconds: int) -> Arrivals:
    """A few requests at any time, and 40 within 15 s every five minutes."""
    for begin_s in range(0, seconds, 300):
        for _ in range(40):
            yield begin_s + 15 * draw.random(), draw.expovariate(0.5)
    at_s = 0.0
    while at_s < seconds:
        at_s += draw.expovariate(0.1)
        yield at_s, draw.expovariate(0.5)


_GENERATORS: dict[str, tuple[Callable[[random.Random, int], Arrivals], float]] = {
    "bursts": (_bursts, 1.0),
    "step": (_step, 1.0),
    "clumps": (_clumps, 1.0),
    "timer": (_timer, 1.0),
    "day": (_day, 12.0),
}
