"""The demo's pass criteria, one line each. An unmeasured figure fails. Pure."""

from benchmarks.testbed.serving_figures import ratio
from benchmarks.testbed.slo import ATTAINMENT_MAX, ATTAINMENT_MIN
from examples.demo.job_figures import Comparison, JobRun
from examples.demo.schema import Interval, Result, ResultCheck

STEP_SPEEDUP_MIN = 1.2
IDEAL_SHARE_MIN = 0.85
TOKENS_RATIO_SPREAD = 0.05
P50_RATIO_MAX = 1.05
ATTAINMENT_LOSS_MAX = 0.002
GAP_RATIO_MAX = 1.1
REWARD_GAIN_MIN = 5.0
REWARD_DISTANCE_MAX = 2.0
BUSY_MIN, BUSY_MAX = 0.4, 0.6
FIRST_TOKEN_S_MAX = 120.0
TOTAL_S_MAX = 600.0


def checks_of(
    result: Result, *, fixed: JobRun, harvest: JobRun, both: Comparison
) -> tuple[ResultCheck, ...]:
    return (
        *_speed(result),
        *_production(result),
        *_exactness(result),
        _at_least("reward gained, fixed (standard errors)", fixed.reward_gain, REWARD_GAIN_MIN),
        _at_least("reward gained, harvest (standard errors)", harvest.reward_gain, REWARD_GAIN_MIN),
        _at_most(
            "last reward, harvest from fixed (standard errors)",
            both.reward_distance,
            REWARD_DISTANCE_MAX,
        ),
        _at_most(
            "seconds to the first harvested token",
            result.seconds_to_first_harvested_token,
            FIRST_TOKEN_S_MAX,
        ),
        _at_most("seconds in all", result.seconds_total, TOTAL_S_MAX),
    )


def _speed(result: Result) -> tuple[ResultCheck, ...]:
    """If the two jobs' token counts differ by more than 5 %, speed is counted per token."""
    tokens = result.ratios.rollout_tokens
    equal = tokens is not None and abs(tokens - 1.0) <= TOKENS_RATIO_SPREAD
    speedup = result.ratios.step_speedup if equal else result.ratios.step_speedup_per_token
    per = "" if equal else " per rollout token"
    return (
        _at_least(f"training step speedup{per}", speedup, STEP_SPEEDUP_MIN),
        _at_least(
            f"training step speedup{per} over the ideal",
            ratio(speedup, result.ideal_speedup),
            IDEAL_SHARE_MIN,
        ),
    )


def _production(result: Result) -> tuple[ResultCheck, ...]:
    alone, shared = result.serving_only, result.harvest
    loss = (
        None
        if alone.slo_attainment is None or shared.slo_attainment is None
        else alone.slo_attainment - shared.slo_attainment
    )
    failed = alone.failed + result.fixed.failed + shared.failed
    sent = min(alone.requests, result.fixed.requests, shared.requests)
    return (
        _within("production busy share", result.production_busy_share, BUSY_MIN, BUSY_MAX),
        _within(
            "SLO attainment, production alone",
            alone.slo_attainment,
            ATTAINMENT_MIN,
            ATTAINMENT_MAX,
        ),
        _at_most("TTFT P50, harvest over alone", result.ratios.ttft_p50, P50_RATIO_MAX),
        _at_most("ITL P50, harvest over alone", result.ratios.itl_p50, P50_RATIO_MAX),
        _reported(
            "TTFT P99, harvest over alone", result.ratios.ttft_p99, result.intervals.ttft_p99
        ),
        _reported("ITL P99, harvest over alone", result.ratios.itl_p99, result.intervals.itl_p99),
        _at_most("SLO attainment lost to harvesting", loss, ATTAINMENT_LOSS_MAX),
        _at_most("failed production requests", failed if sent else None, 0),
    )


def _exactness(result: Result) -> tuple[ResultCheck, ...]:
    kept = result.trajectories
    ran = kept.completed > 0
    return (
        _at_most("trajectories lost", kept.lost if ran else None, 0),
        _at_most("trajectories duplicated", kept.duplicated if ran else None, 0),
        _at_most("stale tokens", result.onpolicy.stale_tokens if ran else None, 0),
        _at_most("weight hash mismatches", result.weights.hash_mismatches, 0),
        _at_most(
            "log-probability gap, harvested over dedicated",
            ratio(result.onpolicy.logprob_gap_harvested, result.onpolicy.logprob_gap_dedicated),
            GAP_RATIO_MAX,
        ),
    )


def _at_least(name: str, value: float | None, limit: float) -> ResultCheck:
    ok = value is not None and value >= limit
    return ResultCheck(name=name, ok=ok, value=value, limit=f"at least {limit:g}")


def _at_most(name: str, value: float | None, limit: float) -> ResultCheck:
    ok = value is not None and value <= limit
    return ResultCheck(name=name, ok=ok, value=value, limit=f"at most {limit:g}")


def _within(name: str, value: float | None, least: float, most: float) -> ResultCheck:
    ok = value is not None and least <= value <= most
    return ResultCheck(name=name, ok=ok, value=value, limit=f"{least:g} to {most:g}")


def _reported(name: str, value: float | None, interval: Interval) -> ResultCheck:
    limit = "reported: too few rounds for an interval"
    if interval is not None:
        limit = f"reported: {interval[0]:.2f} to {interval[1]:.2f}"
    return ResultCheck(name=name, ok=value is not None, value=value, limit=limit)
