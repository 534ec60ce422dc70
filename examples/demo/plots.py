"""The report's figures as SVG. Decides how things look; computes nothing.

One arm has one colour everywhere, and every limit that a line is held to is drawn beside it.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from examples.demo.records import DemoArm, Record, TrainingStep
from examples.demo.schema import Result
from examples.demo.series import LatencySeries, axis_of, grant_series, itl_series, ttft_series
from examples.demo.wording import ARM_TITLES, size
from scheduler.report_page import LIMIT, SOFT, WIDTH, Markup, chart, svg

ARM_COLOURS = {
    DemoArm.SERVING_ONLY: "#4b5563",
    DemoArm.FIXED: "#0b62a8",
    DemoArm.HARVEST: "#b8480a",
}
_PHASES = {"rollout": 1.0, "train": 0.62, "publish and switch": 0.34}


def production_latency(records: Sequence[Record], result: Result) -> Markup:
    """TTFT above, ITL below, one column per arm, all columns on one scale."""
    with chart(5.0) as figure:
        axes = figure.subplots(2, len(DemoArm), sharey="row", squeeze=False)
        for column, arm in enumerate(DemoArm):
            seams_s = axis_of(records, arm).seams_s
            ttft, itl = ttft_series(records, arm), itl_series(records, arm)
            axes[0][column].set_title(ARM_TITLES[arm])
            _latency(axes[0][column], ttft, arm, result.slo.ttft_ms, seams_s)
            _latency(axes[1][column], itl, arm, result.slo.itl_ms, seams_s)
            axes[1][column].set_xlabel("seconds in this arm")
        axes[0][0].set_ylabel("time to first token, ms")
        axes[1][0].set_ylabel("between tokens, ms")
        figure.legend(handles=_latency_keys(), loc="outside upper right", ncols=3, fontsize=8.5)
        alt = "Time to first token and time between tokens in three arms, against the SLO"
        return svg(figure, alt=alt)


def grant_and_rollouts(records: Sequence[Record]) -> Markup:
    """Production's load, the grants, and the guest's use of them, per second."""
    with chart(5.8) as figure:
        series = grant_series(records)
        colour = ARM_COLOURS[DemoArm.HARVEST]
        panels = (
            ("Production's requests in flight", "requests", series.in_flight, "#9ca3af"),
            ("Time that the gate was open", "%", 100 * series.open_share, "#94a3b8"),
            ("Granted to each guest step", "tokens", series.cap_tokens, "#e0996b"),
            ("Harvested rollout tokens", "tokens/s", series.tokens_per_s, colour),
        )
        second = np.arange(len(series.in_flight)) + 0.5
        column = figure.subplots(len(panels), 1, sharex=True)
        for axes, (title, unit, values, fill) in zip(column, panels, strict=True):
            axes.fill_between(second, values, step="mid", color=fill, linewidth=0)
            axes.set(title=title, ylabel=unit)
            axes.set_ylim(bottom=0)
            _seams(axes, axis_of(records, DemoArm.HARVEST).seams_s)
        column[-1].set_xlabel("seconds in the harvesting arm")
        return svg(figure, alt="Production load, grant and harvested rollout tokens over time")


def training_steps(records: Sequence[Record]) -> Markup:
    """Step times by phase, and rollout tokens per second by kind of engine."""
    with chart(3.6) as figure:
        times, speeds = figure.subplots(1, 2)
        for place, arm in ((-0.19, DemoArm.FIXED), (0.19, DemoArm.HARVEST)):
            steps = _steps(records, arm)
            number = np.array([s.step for s in steps], float)
            _phases(times, number + place, steps, arm)
            speed = [s.rollout_tokens / s.rollout_s if s.rollout_s else np.nan for s in steps]
            speeds.plot(number, speed, color=ARM_COLOURS[arm], marker="o", markersize=4)
            speeds.plot([], [], color=ARM_COLOURS[arm], marker="o", label=ARM_TITLES[arm])
        times.set(title="Time of each training step", ylabel="seconds", xlabel="training step")
        times.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
        speeds.set(title="Rollout speed", ylabel="tokens/s", xlabel="training step")
        speeds.set_ylim(bottom=0)
        speeds.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        for axes in (times, speeds):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        alt = "Training step times by phase and rollout tokens per second for both jobs"
        return svg(figure, alt=alt)


def reward(records: Sequence[Record]) -> Markup:
    """Mean reward of each step with two standard errors, both jobs."""
    with chart(3.2, width=WIDTH / 2) as figure:
        axes = figure.subplots()
        for arm in (DemoArm.FIXED, DemoArm.HARVEST):
            steps = _steps(records, arm)
            number = np.array([s.step for s in steps], float)
            mean = np.array([s.reward_mean for s in steps])
            spread = 2 * np.array([s.reward_se for s in steps])
            axes.fill_between(
                number, mean - spread, mean + spread, color=ARM_COLOURS[arm], alpha=0.18, lw=0
            )
            axes.plot(number, mean, color=ARM_COLOURS[arm], marker="o", markersize=4)
            axes.plot([], [], color=ARM_COLOURS[arm], marker="o", label=ARM_TITLES[arm])
        axes.set(title="Reward", ylabel="mean reward of the step", xlabel="training step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=8, loc="lower right")
        return svg(figure, alt="Mean reward over training steps for both jobs")


def bytes_per_version(records: Sequence[Record]) -> Markup:
    """Bytes sent for each version, against the whole model."""
    with chart(3.2, width=WIDTH / 2) as figure:
        axes = figure.subplots()
        for arm in (DemoArm.FIXED, DemoArm.HARVEST):
            steps = [s for s in _steps(records, arm) if s.bytes_sent > 0]
            axes.plot(
                [s.version for s in steps],
                [s.bytes_sent for s in steps],
                color=ARM_COLOURS[arm],
                marker="o",
                markersize=4,
                label=f"sent, {ARM_TITLES[arm]}",
            )
        dense = [s for s in _steps(records, None) if s.bytes_dense > 0]
        if dense:
            axes.axhline(dense[-1].bytes_dense, color=LIMIT, ls="--", lw=1.2, label="whole model")
            axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(title="Bytes per weight version", xlabel="version")
        axes.legend(fontsize=8, loc="center right")
        return svg(figure, alt="Bytes sent per weight version against the size of the whole model")


def _latency(
    axes: Axes, series: LatencySeries, arm: DemoArm, slo_ms: float | None, seams_s: Sequence[float]
) -> None:
    second = np.arange(len(series.p50_s)) + 0.5
    colour = ARM_COLOURS[arm]
    # Before the first line: on a linear axis a single value leaves limits without height.
    axes.set_yscale("log")
    axes.plot(second, 1e3 * series.p99_s, ".", color=colour, alpha=0.55, ms=4)
    axes.plot(second, 1e3 * series.p50_s, color=colour, linewidth=1.5)
    if slo_ms is not None:
        axes.axhline(slo_ms, color=LIMIT, linestyle="--", linewidth=1.2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    _seams(axes, seams_s)


def _latency_keys() -> list[Line2D]:
    return [
        Line2D([], [], color=SOFT, linewidth=1.5, label="P50 of the second"),
        Line2D([], [], color=SOFT, marker=".", linestyle="", label="P99 of the second"),
        Line2D([], [], color=LIMIT, linewidth=1.2, linestyle="--", label="SLO"),
    ]


def _phases(axes: Axes, place: np.ndarray, steps: Sequence[TrainingStep], arm: DemoArm) -> None:
    floor = np.zeros(len(steps))
    for phase, alpha in _PHASES.items():
        height = np.array([_phase_s(step, phase) for step in steps])
        label = f"{arm}: {phase}"
        axes.bar(place, height, 0.35, floor, color=ARM_COLOURS[arm], alpha=alpha, label=label)
        floor += height


def _phase_s(step: TrainingStep, phase: str) -> float:
    if phase == "rollout":
        return step.rollout_s
    return step.train_s if phase == "train" else step.publish_s + step.switch_s


def _steps(records: Sequence[Record], arm: DemoArm | None) -> list[TrainingStep]:
    found = [
        r for r in records if isinstance(r, TrainingStep) and r.block >= 0 and arm in {None, r.arm}
    ]
    return sorted(found, key=lambda step: step.step)


def _seams(axes: Axes, seams_s: Sequence[float]) -> None:
    for seam_s in seams_s:
        axes.axvline(seam_s, color="#9ca3af", linewidth=0.8, linestyle=":")
