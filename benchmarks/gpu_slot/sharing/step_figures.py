"""Production's steps and requests of an arm, and how they compare with those alone. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.gpu_slot.engines.step_log import GuestLog, ProductionLog
from benchmarks.gpu_slot.sharing.blocking import Form

Samples = Callable[[ProductionLog], list[float]]

SAMPLES: Mapping[str, Samples] = {
    "decode_step": lambda log: [s.step_s for s in log.steps if s.kind == "decode"],
    "prefill_step": lambda log: [s.step_s for s in log.steps if s.kind == "prefill"],
    "ttft": lambda log: [request.ttft_s for request in log.requests],
    "itl": lambda log: [gap for request in log.requests for gap in request.itl_s],
}
_P99_SAMPLES_MIN = 100
"""Least samples for a P99; with fewer only the largest is reported."""


def arm_figures(rounds: Sequence[ProductionLog]) -> dict[str, Any]:
    """Milliseconds of each kind of sample over all rounds together."""
    return {
        name: _points([1e3 * value for log in rounds for value in samples(log)])
        for name, samples in SAMPLES.items()
    }


def over_alone(
    rounds: Sequence[ProductionLog],
    alone: Sequence[ProductionLog],
    alone_s: Mapping[Form, float],
) -> dict[str, Any]:
    """Each step over the median of its own form alone, since a slower production has larger
    batches, and each request's first token over that of the same request alone. `rounds` are the
    medians of single rounds, as the spread."""
    steps = [_step_ratios(log, alone_s) for log in rounds]
    firsts = [_paired_firsts(log, other) for log, other in zip(rounds, alone, strict=True)]
    return {"step": _with_rounds(steps), "ttft": _with_rounds(firsts)}


def guest_figures(rounds: Sequence[GuestLog], seconds: float) -> dict[str, Any]:
    """`seconds` are all rounds' together."""
    closed: dict[str, int] = {}
    for log in rounds:
        for reason, count in log.closed.items():
            closed[reason] = closed.get(reason, 0) + count
    steps = [step for log in rounds for step in log.steps]
    return {
        "tokens_per_s": sum(step.tokens for step in steps) / seconds,
        "decoded_tokens_per_s": sum(s.tokens for s in steps if s.kind == "decode") / seconds,
        "steps": len(steps),
        "probes": sum(log.probes for log in rounds),
        "share_of_time": sum(step.step_s for step in steps) / seconds,
        "smallest_step_predicted_ms": [1e3 * log.smallest_step_s for log in rounds],
        "closed_by": closed,
    }


def busy_ratio(rounds: Sequence[ProductionLog], seconds: float) -> float:
    """Share of time in which production's steps ran."""
    return sum(step.step_s for log in rounds for step in log.steps) / seconds


def _step_ratios(log: ProductionLog, alone_s: Mapping[Form, float]) -> list[float]:
    return [step.step_s / alone_s[step.form] for step in log.steps if step.form in alone_s]


def _paired_firsts(log: ProductionLog, alone: ProductionLog) -> list[float]:
    there = {request.number: request.ttft_s for request in alone.requests}
    return [one.ttft_s / there[one.number] for one in log.requests if one.number in there]


def _with_rounds(rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    medians = [float(np.median(values)) for values in rounds if values]
    return _points([value for values in rounds for value in values]) | {"rounds": medians}


def _points(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"count": 0}
    return {
        "count": len(values),
        "mean": float(np.mean(values)),
        "p50": float(np.quantile(values, 0.5)),
        "p90": float(np.quantile(values, 0.9)),
        "p99": float(np.quantile(values, 0.99)) if len(values) >= _P99_SAMPLES_MIN else None,
        "max": max(values),
    }
