"""Production's latencies beside something over those without, on requests that both replayed."""

from typing import Any

from benchmarks.testbed.bootstrap import itl_of, ratio_interval, ttft_of
from benchmarks.testbed.serving_figures import ArmRequests, ratio

PARTS = (("ttft", ttft_of), ("itl", itl_of))


def latency_ratios(above: ArmRequests, below: ArmRequests, *, seed: int) -> dict[str, Any]:
    """`ratios` of P50 and P99, and their `intervals` by the paired block bootstrap."""
    ratios: dict[str, float | None] = {}
    intervals: dict[str, tuple[float, float] | None] = {}
    for name, of in PARTS:
        upper, lower = of(above.shared), of(below.shared)
        for percent in (50, 99):
            key = f"{name}_p{percent}"
            ratios[key] = ratio(upper.percentile_s(percent), lower.percentile_s(percent))
            intervals[key] = ratio_interval(upper, lower, percent=percent, seed=seed)
    return {"ratios": ratios, "intervals": intervals}
