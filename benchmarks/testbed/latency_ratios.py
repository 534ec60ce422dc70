"""Production's latencies beside something over those without, on requests that both replayed."""

from typing import Any

from benchmarks.testbed.bootstrap import itl_of, ttft_of
from benchmarks.testbed.round_ratios import STATISTICS, RoundRatio, round_ratio
from benchmarks.testbed.serving_figures import ArmRequests


def latency_ratios(above: ArmRequests, below: ArmRequests) -> dict[str, Any]:
    """`ratios` of P50, mean and P99, their 95 % `intervals` over rounds and `half_widths`."""
    found: dict[str, RoundRatio] = {}
    for name, of in (("ttft", ttft_of), ("itl", itl_of)):
        upper, lower = of(above.shared), of(below.shared)
        for statistic, figure in STATISTICS.items():
            found[f"{name}_{statistic}"] = round_ratio(upper, lower, figure)
    return {
        "ratios": {name: each.ratio for name, each in found.items()},
        "intervals": {name: each.interval for name, each in found.items()},
        "half_widths": {name: each.half_width for name, each in found.items()},
    }
