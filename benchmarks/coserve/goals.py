"""The goals of the shipped arm, and whether a run meets, misses or cannot tell each. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

REQUESTS_MIN = 5000
"""Requests in each arm, for any verdict on a latency."""


class GoalVerdict(StrEnum):
    MET = "met"
    MISSED = "missed"
    OPEN = "open"
    """Not measured, an interval that is too wide or holds the goal, or too few requests."""


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
BUSY_SHARE_NEAR = 0.05
"""A share that is met, or no longer asked for, is so at a busy share this near to the one above."""
STEP_OVERHEAD_MAX_US = 40.0
STEPS_MET_MAX = 1
STEPS_MET_BEYOND_MAX = 0.01
"""Requests that meet more steps than that: at most this share, so that P99 is within."""
STEPS_UNSEEN_MAX = 0.02
"""Steps that the benchmark did not see, for any verdict on how many a request met."""

Interval = tuple[float, float]


def verdicts(result: Mapping[str, Any], *, requests: int) -> dict[str, GoalVerdict]:
    """`result` are the figures; `requests` the fewest of any arm that serves.

    Every verdict is of a 95 % interval: met where all of it is, missed where none of it is.
    """
    found: dict[str, GoalVerdict] = {}
    for name, goal in LATENCIES.items():
        interval, width = result["intervals"].get(name), result["half_widths"].get(name)
        known = width is not None and width < goal.half_width and requests >= REQUESTS_MIN
        found[name] = _at_most(interval if known else None, goal.most_ratio)
    found["residual_share"] = _residual_share(
        result["residual_interval"], result["production_busy_share"]
    )
    overhead, beyond = result["step_overhead_interval_us"], result["steps_met_beyond_interval"]
    found["step_overhead_us"] = _at_most(overhead, STEP_OVERHEAD_MAX_US)
    unseen = result["steps_unseen_ratio"]
    seen = unseen is not None and unseen <= STEPS_UNSEEN_MAX
    found["steps_met_p99"] = _at_most(beyond if seen else None, STEPS_MET_BEYOND_MAX)
    if not result["orders_balanced"]:
        return dict.fromkeys(found, GoalVerdict.OPEN)
    return found


def _residual_share(interval: Interval | None, busy_share: float | None) -> GoalVerdict:
    """Met only by a production that is about as busy as the goal says."""
    if interval is None or busy_share is None or busy_share > BUSY_SHARE_MAX + BUSY_SHARE_NEAR:
        return GoalVerdict.OPEN
    low, high = interval
    verdict = _at_most((-high, -low), -RESIDUAL_SHARE_MIN)
    less_busy = busy_share < BUSY_SHARE_MAX - BUSY_SHARE_NEAR
    return GoalVerdict.OPEN if verdict is GoalVerdict.MET and less_busy else verdict


def _at_most(interval: Interval | None, most: float) -> GoalVerdict:
    if interval is None:
        return GoalVerdict.OPEN
    low, high = interval
    if high <= most:
        return GoalVerdict.MET
    return GoalVerdict.MISSED if low > most else GoalVerdict.OPEN
