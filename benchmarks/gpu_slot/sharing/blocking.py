"""Delay of production by a guest step that already runs. Pure: from two logs of steps.

The first production step that begins while a guest step runs is late. Its delay is its time over
the median of its form alone. Its figures:

    over_overlap   delay over the time in which both ran: 1 where the device finishes a step before
                   it begins another, 0.5 where both get half of it in short turns, 0 where neither
                   delays the other
    over_own       delay over production's own time

A device of short turns delays production by no more than its own time, however long the guest
step: a short step is no evidence for a long one. So the slack law's two constants,
`delay = preemption_s + blocking_ratio * rest`, are of those overlaps alone in which production's
step is at least as long as the rest, which is what the guest step, at the median of its form
alone, still had to run.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.gpu_slot.engines.step_log import LoggedStep

Form = tuple[str, int]
Samples = npt.NDArray[np.float64]
_LEAST_SAMPLES = 30


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    form: Form
    """Form of production's step."""
    rest_s: float
    """Time that the guest's step still had to run when production's began."""
    overlap_s: float
    """Time for which both ran, in s."""
    own_s: float
    """Production's step alone."""
    delay_s: float
    """May be negative: a step is not always its median."""


def times_alone(steps: Iterable[LoggedStep]) -> dict[Form, float]:
    """Median seconds of each form."""
    taken: dict[Form, list[float]] = defaultdict(list)
    for step in steps:
        taken[step.form].append(step.step_s)
    return {form: median(times) for form, times in taken.items()}


def named_ms(times_s: dict[Form, float]) -> dict[str, float]:
    return {f"{kind}_{size}": 1e3 * time_s for (kind, size), time_s in sorted(times_s.items())}


def overlaps(
    production: Sequence[LoggedStep],
    guest: Sequence[LoggedStep],
    *,
    production_alone_s: dict[Form, float],
    guest_alone_s: dict[Form, float],
) -> list[Overlap]:
    """The first production step that began within each guest step, unless another guest step began
    before its end. Both logs are in order."""
    starts = [step.start_ns for step in guest]
    found: list[Overlap] = []
    met: set[int] = set()
    for step in production:
        index = bisect_right(starts, step.start_ns) - 1
        if index < 0 or guest[index].end_ns <= step.start_ns or index in met:
            continue
        met.add(index)
        running = guest[index]
        own_s, whole_s = production_alone_s.get(step.form), guest_alone_s.get(running.form)
        after = guest[index + 1] if index + 1 < len(guest) else None
        if own_s is None or whole_s is None or (after and after.start_ns < step.end_ns):
            continue
        found.append(
            Overlap(
                form=step.form,
                rest_s=max(0.0, whole_s - (step.start_ns - running.start_ns) * 1e-9),
                overlap_s=(min(step.end_ns, running.end_ns) - step.start_ns) * 1e-9,
                own_s=own_s,
                delay_s=step.step_s - own_s,
            )
        )
    return found


def blocking_figures(found: Sequence[Overlap]) -> dict[str, Any]:
    """Figures by form of production's step; the law's constants if enough overlaps bear them."""
    forms: dict[str, Any] = {}
    for form in sorted({one.form for one in found}):
        of_form = [one for one in found if one.form == form]
        forms[f"{form[0]}_{form[1]}"] = {
            "count": len(of_form),
            "own_ms": 1e3 * of_form[0].own_s,
            "rest_ms": _quantiles([1e3 * one.rest_s for one in of_form]),
            "delay_ms": _quantiles([1e3 * one.delay_s for one in of_form]),
            "over_overlap": _quantiles([one.delay_s / one.overlap_s for one in of_form]),
            "over_own": _quantiles([one.delay_s / one.own_s for one in of_form]),
        }
    long_enough = [one for one in found if one.own_s >= one.rest_s]
    return {"forms": forms, "law": _line(long_enough)}


def _line(found: Sequence[Overlap]) -> dict[str, Any]:
    """Least squares, and by how much it must be raised for all delays to lie below it."""
    if len(found) < _LEAST_SAMPLES:
        return {"count": len(found)}
    rest = np.array([one.rest_s for one in found])
    delay = np.array([one.delay_s for one in found])
    ratio, base_s = np.polyfit(rest, delay, 1) if rest.std() > 0.0 else (0.0, delay.mean())
    beyond = delay - ratio * rest - base_s
    return {
        "count": len(found),
        "blocking_ratio": float(ratio),
        "preemption_ms": 1e3 * float(base_s),
        "largest_preemption_ms": 1e3 * float(base_s + beyond.max()),
        "rms_ms": 1e3 * float(np.sqrt((beyond**2).mean())),
        "rest_ms": _quantiles([1e3 * one.rest_s for one in found]),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    """The largest stands for a P99, which some hundred samples do not have."""
    named = {f"p{round(100 * q)}": float(np.quantile(values, q)) for q in (0.1, 0.5, 0.9)}
    return named | {"max": max(values)}
