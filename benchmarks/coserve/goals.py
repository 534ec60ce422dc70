"""The goals of the shipped arm, and whether a run meets, misses or cannot tell each. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

REQUESTS_MIN = 5000
"""Requests in each arm, for any verdict on a latency."""


class Verdict(StrEnum):
    MET = "met"
    MISSED = "missed"
    OPEN = "open"
    """Not measured, or too wide an interval, or too few requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyGoal:
    most_ratio: float
    half_width: float
    """A wider interval gives no verdict."""


LATENCIES: Mapping[str, LatencyGoal] = {
    "ttft_p50": LatencyGoal(most_ratio=1.03, half_width=0.03),
    "ttft_mean": LatencyGoal(most_ratio=1.03, half_width=0.03),
    "ttft_p99": LatencyGoal(most_ratio=1.05, half_width=0.03),
    "itl_p50": LatencyGoal(most_ratio=1.02, half_width=0.02),
    "itl_mean": LatencyGoal(most_ratio=1.02, half_width=0.02),
    "itl_p99": LatencyGoal(most_ratio=1.05, half_width=0.02),
}
RESIDUAL_SHARE_MIN = 0.92
BUSY_SHARE_MAX = 0.7
"""The goal of the residual share holds up to here."""
STEP_OVERHEAD_MAX_US = 40.0
STEPS_MET_P99_MAX = 1


def verdicts(result: Mapping[str, Any], *, requests: int) -> dict[str, Verdict]:
    """`result` are the figures; `requests` the fewest of any arm that serves."""
    found: dict[str, Verdict] = {}
    for name, goal in LATENCIES.items():
        ratio, width = result["ratios"].get(name), result["half_widths"].get(name)
        known = ratio is not None and width is not None and width < goal.half_width
        found[name] = _at_most(
            ratio if known and requests >= REQUESTS_MIN else None, goal.most_ratio
        )
    share, busy = result["residual_share"], result["production_busy_share"]
    comparable = share is not None and busy is not None and busy <= BUSY_SHARE_MAX
    found["residual_share"] = _at_most(-share if comparable else None, -RESIDUAL_SHARE_MIN)
    found["step_overhead_us"] = _at_most(result["step_overhead_us"], STEP_OVERHEAD_MAX_US)
    found["steps_met_p99"] = _at_most(result["steps_met_p99"], STEPS_MET_P99_MAX)
    return found


def _at_most(value: float | None, most: float) -> Verdict:
    if value is None:
        return Verdict.OPEN
    return Verdict.MET if value <= most else Verdict.MISSED
