"""Production's latencies beside something over those without, on requests that both replayed."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.testbed.latencies import itl_of, ttft_of
from benchmarks.testbed.round_ratios import STATISTICS, RoundRatio, round_ratio
from benchmarks.testbed.serving_figures import ArmRequests

_UNKNOWN: Mapping[int, float] = MappingProxyType({})


def latency_ratios(
    above: ArmRequests, below: ArmRequests, slower: Mapping[int, float] = _UNKNOWN
) -> dict[str, Any]:
    """`ratios` of P50, mean and P99, their 95 % `intervals` over rounds and `half_widths`.

    `slower` is by round the logarithm of how much slower the machine was in `above`'s slice: where
    it is known of all rounds figures are of equal speeds, and `unadjusted` has those as measured.
    """
    rounds = sorted({r.block for r in above.shared} & {r.block for r in below.shared})
    covariates = [slower[each] for each in rounds if each in slower]
    found = _figures(above, below, covariates if len(covariates) == len(rounds) else ())
    if covariates:
        found["unadjusted"] = _figures(above, below, ())
    return found


def _figures(above: ArmRequests, below: ArmRequests, covariates: Sequence[float]) -> dict[str, Any]:
    found: dict[str, RoundRatio] = {}
    for name, of in (("ttft", ttft_of), ("itl", itl_of)):
        upper, lower = of(above.shared), of(below.shared)
        for statistic, figure in STATISTICS.items():
            found[f"{name}_{statistic}"] = round_ratio(upper, lower, figure, covariates)
    return {
        "ratios": {name: each.ratio for name, each in found.items()},
        "intervals": {name: each.interval for name, each in found.items()},
        "half_widths": {name: each.half_width for name, each in found.items()},
    }
