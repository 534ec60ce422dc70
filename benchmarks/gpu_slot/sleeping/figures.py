"""Figures of passes over sleeping weights and of the production steps beside them. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.gpu_slot.sleeping.pieces import Pass
from benchmarks.gpu_slot.sleeping.production import Step
from benchmarks.gpu_slot.spread import spread


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """One pass and production's steps in its round, in milliseconds."""

    taken: Pass
    during_ms: tuple[float, ...]
    """Steps that overlap the pass."""
    alone_ms: tuple[float, ...]
    """Steps of the same round while nothing else ran."""


def steps_during(steps: Iterable[Step], began_ns: int, ended_ns: int) -> tuple[float, ...]:
    """Milliseconds of the steps that overlap the time, whole: a step that waits may outlast it."""
    return tuple(
        (end - start) * 1e-6 for start, end in steps if start < ended_ns and end > began_ns
    )


def pass_figures(passes: Sequence[Pass]) -> dict[str, Any]:
    seconds = [one.seconds for one in passes]
    names = sorted({name for one in passes for name in one.calls})
    return {
        "seconds": spread(seconds),
        "gb_per_s": spread([1e-9 * one.size_bytes / one.seconds for one in passes]),
        "calls": {name: _calls([one.calls.get(name, []) for one in passes]) for name in names},
    }


def _calls(taken: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Calls of one name, pass by pass, in seconds."""
    return {
        "per_pass": median(len(one) for one in taken),
        "ms_per_pass": spread([1e3 * sum(one) for one in taken]),
        "ms_longest": 1e3 * max((max(one, default=0.0) for one in taken), default=0.0),
    }


def production_figures(trials: Sequence[MeasuredPass]) -> dict[str, Any]:
    """Production's steps while the passes ran, against the same rounds without one."""
    ratios = [
        fmean(one.during_ms) / fmean(one.alone_ms)
        for one in trials
        if one.during_ms and one.alone_ms
    ]
    return {
        "step_ms": step_figures([ms for one in trials for ms in one.during_ms]),
        "alone_step_ms": step_figures([ms for one in trials for ms in one.alone_ms]),
        "mean_ratio": spread(ratios),
        "delay_ms_per_pass": spread([_delay_ms(one) for one in trials if one.alone_ms]),
    }


def _delay_ms(trial: MeasuredPass) -> float:
    """Time that the steps beside a pass took beyond as many steps alone."""
    return sum(trial.during_ms) - len(trial.during_ms) * fmean(trial.alone_ms)


def step_figures(steps_ms: Sequence[float]) -> dict[str, float]:
    if not steps_ms:
        return {"count": 0}
    p50, p99 = np.quantile(steps_ms, (0.5, 0.99))
    return {
        "mean": fmean(steps_ms),
        "p50": float(p50),
        "p99": float(p99),
        "longest": max(steps_ms),
        "count": len(steps_ms),
    }
