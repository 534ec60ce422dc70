"""Production's steps and requests of an arm, and their ratios to those alone. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.gpu_slot.engines.step_log import GuestLog, ProductionLog

Samples = Callable[[ProductionLog], list[float]]

SAMPLES: Mapping[str, Samples] = {
    "decode_step": lambda log: [s.step_s for s in log.steps if s.kind == "decode"],
    "prefill_step": lambda log: [s.step_s for s in log.steps if s.kind == "prefill"],
    "ttft": lambda log: [request.ttft_s for request in log.requests],
    "itl": lambda log: [gap for request in log.requests for gap in request.itl_s],
}
_POINTS: Mapping[str, Callable[[Any], float]] = {
    "p50": lambda values: float(np.quantile(values, 0.5)),
    "p99": lambda values: float(np.quantile(values, 0.99)),
    "mean": lambda values: float(np.mean(values)),
}


def arm_figures(rounds: Sequence[ProductionLog]) -> dict[str, Any]:
    """Milliseconds of each kind of sample over all rounds together."""
    figures: dict[str, Any] = {}
    for name, samples in SAMPLES.items():
        values = [value for log in rounds for value in samples(log)]
        figures[name] = {"count": len(values)}
        if values:
            points = {point: 1e3 * of(values) for point, of in _POINTS.items()}
            figures[name] |= {f"{point}_ms": value for point, value in points.items()}
    return figures


def ratios(rounds: Sequence[ProductionLog], alone: Sequence[ProductionLog]) -> dict[str, Any]:
    """Over all rounds together, and each round's over the same round alone as the spread."""
    found: dict[str, Any] = {}
    for name, samples in SAMPLES.items():
        for point, of in _POINTS.items():
            pooled = _ratio(of, samples, rounds, alone)
            each = [
                _ratio(of, samples, [one], [other])
                for one, other in zip(rounds, alone, strict=True)
            ]
            known = [ratio for ratio in each if ratio is not None]
            found[f"{name}_{point}"] = {
                "ratio": pooled,
                "rounds": [min(known), max(known)] if known else None,
            }
    return found


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
        "share_of_time": sum(step.step_s for step in steps) / seconds,
        "closed_by": closed,
    }


def busy_ratio(rounds: Sequence[ProductionLog], seconds: float) -> float:
    """Share of time in which production's steps ran."""
    return sum(step.step_s for log in rounds for step in log.steps) / seconds


def _ratio(
    of: Callable[[Any], float],
    samples: Samples,
    rounds: Sequence[ProductionLog],
    alone: Sequence[ProductionLog],
) -> float | None:
    above = [value for log in rounds for value in samples(log)]
    below = [value for log in alone for value in samples(log)]
    return of(above) / of(below) if above and below and of(below) > 0.0 else None
