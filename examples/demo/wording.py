"""Formats of figures for people, the same in the report, the table and the progress lines."""

from benchmarks.testbed.serving_figures import Serving
from examples.demo.records import DemoArm
from examples.demo.schema import Interval, Result, ServingAndJob

MISSING = "–"
ARM_TITLES = {
    DemoArm.SERVING_ONLY: "production alone",
    DemoArm.FIXED: "RL on its own engine",
    DemoArm.HARVEST: "RL with harvesting",
}


def number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return MISSING
    if isinstance(value, int) or value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.{digits}f}"


def fixed_point(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    return MISSING if share is None else f"{100 * share:.{digits}f} %"


def times(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.2f}×"


def change(ratio: float | None) -> str:
    # Adding 0.0 turns a rounded -0.0 into 0.0.
    return MISSING if ratio is None else f"{round(100 * (ratio - 1), 1) + 0.0:+.1f} %"


def interval(of: Interval) -> str:
    return MISSING if of is None else f"{of[0]:.2f} to {of[1]:.2f}"


def size(count_bytes: float | None) -> str:
    if count_bytes is None:
        return MISSING
    for unit in ("B", "kB", "MB"):
        if count_bytes < 1000:
            return f"{count_bytes:.3g} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:.3g} GB"


def arm_rows(result: Result) -> list[tuple[str, str, str, str]]:
    """Figures by arm: name with unit, production alone, fixed, harvest."""
    arms = (result.serving_only, result.fixed, result.harvest)
    jobs = (None, result.fixed, result.harvest)
    return [
        _row("TTFT P50, ms", [fixed_point(arm.ttft_p50_ms, 1) for arm in arms]),
        _row("TTFT P99, ms", [fixed_point(arm.ttft_p99_ms, 1) for arm in arms]),
        _row("ITL P50, ms", [fixed_point(arm.itl_p50_ms) for arm in arms]),
        _row("ITL P99, ms", [fixed_point(arm.itl_p99_ms) for arm in arms]),
        _row("SLO attainment", [percent(arm.slo_attainment, 2) for arm in arms]),
        _row(
            "nothing in flight",
            [percent(result.nothing_in_flight_share.get(arm)) for arm in DemoArm],
        ),
        _row("requests in every arm", [number(arm.requests) for arm in arms]),
        _row("failed / sent", [_failed(arm) for arm in arms]),
        _row("training steps", [number(job.steps) if job else "" for job in jobs]),
        _row("step time, s", [fixed_point(job.step_s_mean) if job else "" for job in jobs]),
        _row(
            "rollout share of a step", [percent(job.rollout_share) if job else "" for job in jobs]
        ),
        _row("rollout tokens", [number(job.rollout_tokens) if job else "" for job in jobs]),
        _row(
            "rollout tokens/s",
            [fixed_point(job.rollout_tokens_per_s, 0) if job else "" for job in jobs],
        ),
        _row("reward, first to last steps", [_reward(job) if job else "" for job in jobs]),
    ]


def ratio_rows(result: Result) -> list[tuple[str, str, str]]:
    """Production's latency over production alone: name, fixed, harvest, each with its interval."""
    names = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
    pairs = (
        (result.fixed_ratios, result.fixed_intervals),
        (result.ratios, result.intervals),
    )
    rows = []
    for name in names:
        fixed, harvest = (
            f"{fixed_point(getattr(ratios, name, None))} ({interval(getattr(spans, name, None))})"
            for ratios, spans in pairs
        )
        kind, percentile = name.split("_")
        rows.append((f"{kind.upper()} {percentile.upper()} over alone", fixed, harvest))
    return rows


def summary(result: Result) -> str:
    """The run in one sentence."""
    ratios = result.ratios
    if ratios.step_speedup is None:
        return "The run ended before both jobs had taken a step; nothing can be compared."
    alone, shared = result.serving_only.slo_attainment, result.harvest.slo_attainment
    return (
        f"On production's idle time the RL job's training steps ran {times(ratios.step_speedup)} "
        f"as fast ({times(result.ideal_speedup)} would be all of it), while production's median "
        f"TTFT changed by {change(ratios.ttft_p50)}, its median time between tokens by "
        f"{change(ratios.itl_p50)}, and its SLO attainment went from {percent(alone, 2)} to "
        f"{percent(shared, 2)}."
    )


def _row(name: str, cells: list[str]) -> tuple[str, str, str, str]:
    alone, fixed, harvest = cells
    return name, alone, fixed, harvest


def _failed(arm: Serving) -> str:
    return f"{arm.failed} / {number(arm.requests_sent)}"


def _reward(job: ServingAndJob) -> str:
    return f"{fixed_point(job.reward_first)} → {fixed_point(job.reward_last)}"
