"""How long production waits for a guest step that already runs. Pure: from two logs of steps.

A production step that begins while a guest step runs is late. Its delay is its time over the median
of its form alone; the rest is what the guest step, at the median of its form alone, still had to
run. Delays are a preemption time, paid however short the rest, and a share of one of two lengths:

    by_rest      delay = preemption_s + blocking_ratio * rest
    by_lesser    delay = preemption_s + blocking_ratio * min(rest, production's own step)

The first is the slack law's, and what a device does that finishes a step before it begins another.
The second is that of a device that gives both half of its time in turns shorter than a step: there
a short production step is late by no more than itself, and the first form finds a ratio that holds
for steps of these lengths alone. The form with the smaller `rms_ms` describes the device.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.gpu_slot.engines.step_log import Step

Form = tuple[str, int]
Samples = npt.NDArray[np.float64]
_LEAST_SAMPLES = 30
_REST_LEAST_S = 1e-4
"""A shorter rest says nothing of a ratio; its delay is preemption."""
_QUANTILE = 0.99


class Overlap(msgspec.Struct, frozen=True):
    rest_s: float
    """What the guest's step still had to run when production's began."""
    own_s: float
    """Production's step alone."""
    delay_s: float
    """May be negative: a step is not always its median."""


def times_alone(steps: Iterable[Step]) -> dict[Form, float]:
    """Median seconds of each form."""
    taken: dict[Form, list[float]] = defaultdict(list)
    for step in steps:
        taken[step.form].append(step.step_s)
    return {form: median(times) for form, times in taken.items()}


def overlaps(
    production: Sequence[Step],
    guest: Sequence[Step],
    *,
    production_alone_s: dict[Form, float],
    guest_alone_s: dict[Form, float],
) -> list[Overlap]:
    """Production steps that began while a guest step ran, and during which no other one began."""
    starts = [step.start_ns for step in guest]
    found: list[Overlap] = []
    for step in production:
        place = bisect_right(starts, step.start_ns) - 1
        alone_s = production_alone_s.get(step.form)
        if place < 0 or alone_s is None or guest[place].end_ns <= step.start_ns:
            continue
        after = guest[place + 1] if place + 1 < len(guest) else None
        if after is not None and after.start_ns < step.end_ns:
            continue
        running = guest[place]
        ran_s = (step.start_ns - running.start_ns) * 1e-9
        whole_s = guest_alone_s.get(running.form)
        if whole_s is not None:
            found.append(Overlap(max(0.0, whole_s - ran_s), alone_s, step.step_s - alone_s))
    return found


def blocking_figures(found: Sequence[Overlap]) -> dict[str, Any]:
    """Both forms, and the delays themselves. Too few overlaps give their count alone."""
    figures: dict[str, Any] = {"overlaps": len(found)}
    if len(found) < _LEAST_SAMPLES:
        return figures
    rest = np.array([one.rest_s for one in found])
    own = np.array([one.own_s for one in found])
    delay = np.array([one.delay_s for one in found])
    figures |= {
        "by_rest": _line(rest, delay),
        "by_lesser": _line(np.minimum(rest, own), delay),
        "rest_ms": _quantiles(1e3 * rest),
        "own_ms": _quantiles(1e3 * own),
        "delay_ms": _quantiles(1e3 * delay),
    }
    long = rest > _REST_LEAST_S
    if long.any():
        figures["delay_over_rest"] = _quantiles(delay[long] / rest[long])
    return figures


def _line(length: Samples, delay: Samples) -> dict[str, float]:
    """Least squares. `upper_preemption_ms` is the same line raised until 99 % of the delays lie
    below it: what a law would have to count with."""
    ratio, base_s = np.polyfit(length, delay, 1) if length.std() > 0.0 else (0.0, delay.mean())
    beyond = delay - ratio * length - base_s
    return {
        "blocking_ratio": float(ratio),
        "preemption_ms": 1e3 * float(base_s),
        "upper_preemption_ms": 1e3 * float(base_s + np.quantile(beyond, _QUANTILE)),
        "rms_ms": 1e3 * float(np.sqrt((beyond**2).mean())),
    }


def _quantiles(values: Samples) -> dict[str, float]:
    return {f"p{round(100 * q)}": float(np.quantile(values, q)) for q in (0.1, 0.5, 0.9, 0.99)}
