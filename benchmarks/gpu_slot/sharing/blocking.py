"""How long production waits for a guest step that already runs. Pure: from two logs of steps.

A production step that begins while a guest step runs is late by at most the rest of that step. Its
delay is its time over the median of its form alone; the rest is what the guest step, at the median
of its form alone, still had to run. Delays are then a preemption time, paid however short the rest,
and a share of the rest:

    delay = preemption_s + blocking_ratio * rest
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import msgspec
import numpy as np

from benchmarks.gpu_slot.engines.step_log import Step

Form = tuple[str, int]
_LEAST_SAMPLES = 30
_REST_LEAST_S = 1e-4
"""A shorter rest says nothing of a ratio; its delay is preemption."""
_QUANTILE = 0.99


class Overlap(msgspec.Struct, frozen=True):
    rest_s: float
    """What the guest's step still had to run when production's began."""
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
            found.append(Overlap(max(0.0, whole_s - ran_s), step.step_s - alone_s))
    return found


def blocking_figures(found: Sequence[Overlap]) -> dict[str, Any]:
    """The line through the delays, and the upper one that a law would have to count with.

    `blocking_ratio` and `preemption_ms` are of the least squares line; `upper_preemption_ms` is the
    same line raised until 99 % of the delays lie below it.
    """
    figures: dict[str, Any] = {"overlaps": len(found)}
    if len(found) < _LEAST_SAMPLES:
        return figures
    rest = np.array([one.rest_s for one in found])
    delay = np.array([one.delay_s for one in found])
    long = rest > _REST_LEAST_S
    ratios = delay[long] / rest[long]
    if rest.std() > 0.0:
        ratio, base_s = np.polyfit(rest, delay, 1)
    else:
        ratio, base_s = 0.0, float(delay.mean())
    beyond = float(np.quantile(delay - ratio * rest - base_s, _QUANTILE))
    figures |= {
        "blocking_ratio": float(ratio),
        "preemption_ms": 1e3 * float(base_s),
        "upper_preemption_ms": 1e3 * float(base_s + beyond),
        "rest_ms_p50": 1e3 * float(np.quantile(rest, 0.5)),
        "delay_ms": _quantiles(1e3 * delay),
    }
    if ratios.size:
        figures["delay_over_rest"] = _quantiles(ratios)
    return figures


def _quantiles(values: "np.ndarray[Any, np.dtype[np.float64]]") -> dict[str, float]:
    return {f"p{round(100 * q)}": float(np.quantile(values, q)) for q in (0.1, 0.5, 0.9, 0.99)}
