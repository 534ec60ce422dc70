"""Figures from requests and slices. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.coserve.arms import ALONE, BESIDE, WITH_PRODUCTION, Arm
from benchmarks.coserve.residual import residual_figures
from benchmarks.coserve.rounds import Slice
from benchmarks.testbed.bootstrap import ratio_draws
from benchmarks.testbed.latency_ratios import PARTS, latency_ratios
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.serving_figures import ArmRequests, arms_of, serving_of
from benchmarks.testbed.slo import choose_slo

_INCONCLUSIVE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    trace: str
    requests_per_s: float
    seed: int


def figures(
    requests: Sequence[ProductionRequest], slices: Sequence[Slice], facts: Facts
) -> dict[str, Any]:
    """Every latency rests on the requests that all arms replayed."""
    given = arms_of(requests, WITH_PRODUCTION)
    alone = ArmRequests(
        sent=tuple(r for arm in ALONE for r in given[arm].sent),
        shared=tuple(r for arm in ALONE for r in given[arm].shared),
    )
    slo = choose_slo(alone.shared)
    busy = fmean(s.production_busy_s / s.seconds for s in slices if s.arm in ALONE)
    used = fmean(s.production_core_s / s.seconds for s in slices if s.arm in ALONE)
    speeds = {arm: _speed(slices, arm) for arm in Arm}
    arms: dict[str, dict[str, Any]] = {}
    for arm in WITH_PRODUCTION:
        serving = serving_of(given[arm], ttft_slo_s=slo.ttft_s, itl_slo_s=slo.itl_s)
        arms[arm] = {
            "ttft_p50_ms": serving.ttft_p50_ms,
            "ttft_p99_ms": serving.ttft_p99_ms,
            "itl_p50_ms": serving.itl_p50_ms,
            "itl_p99_ms": serving.itl_p99_ms,
            "slo_attainment": serving.slo_attainment,
            "rollout_tokens_per_s": speeds[arm],
            "requests": serving.requests,
            "failed": serving.failed,
        }
    arms[Arm.ROLLOUTS] = {"rollout_tokens_per_s": speeds[Arm.ROLLOUTS]}
    base = serving_of(alone, ttft_slo_s=slo.ttft_s, itl_slo_s=slo.itl_s)
    beside = {
        arm: latency_ratios(given[arm], alone, seed=facts.seed)
        | {"slo_attainment_drop": _points(base.slo_attainment, arms[arm]["slo_attainment"])}
        | residual_figures(slices, arm, seed=facts.seed)
        for arm in BESIDE
    }
    ours, gate = beside[Arm.ROSEMUX], beside[Arm.GATE_ONLY]
    return {
        "trace": facts.trace,
        "requests_per_s": facts.requests_per_s,
        "slo": {"ttft_ms": slo.ttft_s * 1e3, "itl_ms": slo.itl_s * 1e3},
        "arms": arms,
        "ratios": ours["ratios"],
        "intervals": ours["intervals"],
        "gate_only_ratios": gate["ratios"],
        "gate_only_intervals": gate["intervals"],
        "aa_p95": {f"{name}_p99": _aa_p95(given, of, seed=facts.seed) for name, of in PARTS},
        "slo_attainment_drop": ours["slo_attainment_drop"],
        "gate_only_slo_attainment_drop": gate["slo_attainment_drop"],
        "production_busy_share": busy,
        "production_core_share": used,
        "residual_share": ours["residual_share"],
        "residual_interval": ours["residual_interval"],
        "gate_only_residual_share": gate["residual_share"],
        "gate_only_residual_interval": gate["residual_interval"],
        "beside": beside,
        "step_overhead_us": 1e6 * fmean(s.decide_s_mean for s in slices if s.arm is Arm.ROSEMUX),
        "inconclusive": inconclusive(ours["intervals"]),
    }


def inconclusive(intervals: Mapping[str, tuple[float, float] | None]) -> list[str]:
    """Names of the intervals that are too wide to say anything about a few per cent."""
    return [
        name
        for name, interval in intervals.items()
        if interval is None or (interval[1] - interval[0]) / 2 > _INCONCLUSIVE
    ]


def _aa_p95(given: Mapping[Arm, ArmRequests], of: Any, *, seed: int) -> float | None:
    """95th percentile of production alone over itself: what this machine calls equal."""
    one, other = (of(given[arm].shared) for arm in ALONE)
    draws = ratio_draws(other, one, percent=99, seed=seed)
    return float(np.percentile(draws, 95)) if len(draws) else None


def _speed(slices: Sequence[Slice], arm: Arm) -> float:
    own = [s for s in slices if s.arm is arm]
    return sum(s.guest_tokens for s in own) / sum(s.seconds for s in own)


def _points(alone: float | None, beside: float | None) -> float | None:
    return None if alone is None or beside is None else 100.0 * (alone - beside)
