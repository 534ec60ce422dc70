"""`report.html`: one file that shows a run, readable without anything else.

Assembles text and figures; every number comes from the result, every curve from the records.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.demo import plots, wording
from examples.demo.records import Record
from examples.demo.schema import Result, ResultCheck
from harvester.platform.whole_file import write_whole
from scheduler.report_page import Markup, page


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    caption: str
    picture: Markup


@dataclass(frozen=True, slots=True)
class Tile:
    figure: str
    label: str
    note: str


def write_report(path: Path, result: Result, records: Sequence[Record]) -> None:
    """Replaces `path` only once the page is whole."""
    write_whole(path, report_html(result, records))


def report_html(result: Result, records: Sequence[Record]) -> str:
    return page(
        "examples.demo",
        "report.html",
        title=f"RoseMux demo: {result.trace}",
        result=result,
        summary=wording.summary(result),
        tiles=_tiles(result),
        arms=wording.arm_rows(result),
        ratios=wording.ratio_rows(result),
        wide=_wide_plots(records, result),
        narrow=_narrow_plots(records, result),
        number=wording.number,
        columns=_halves(result.checks),
        failed=sum(not check.ok for check in result.checks),
    )


def _tiles(result: Result) -> list[Tile]:
    kept = result.trajectories
    wrong = (kept.lost, kept.duplicated, result.onpolicy.stale_tokens)
    return [
        Tile(
            wording.times(result.ratios.step_speedup),
            "training step speed, harvest over fixed",
            f"ideal with all of production's idle time: {wording.times(result.ideal_speedup)}",
        ),
        Tile(
            wording.change(result.ratios.ttft_p50),
            "production's median TTFT",
            f"between tokens: {wording.change(result.ratios.itl_p50)}; limit +5 %",
        ),
        Tile(
            wording.percent(result.harvest.slo_attainment, 2),
            "SLO attainment with harvesting",
            f"production alone: {wording.percent(result.serving_only.slo_attainment, 2)}",
        ),
        Tile(
            " / ".join(wording.number(count) for count in wrong),
            "trajectories lost / duplicated, stale tokens",
            f"{wording.number(kept.completed)} trajectories, "
            f"{wording.number(kept.migrated)} moved between engines",
        ),
    ]


def _wide_plots(records: Sequence[Record], result: Result) -> list[Plot]:
    return [
        Plot(
            "Latencies of production in each arm",
            "Latencies per second of each arm: the line is the median, the dots are the 99th "
            "percentile, the dashed line is the SLO. All columns replay the same requests on one "
            "scale. Dotted verticals are seams between blocks. Harvesting costs nothing where the "
            "right column looks like the left one.",
            plots.production_latency(records, result),
        ),
        Plot(
            "Lent idle time",
            "Means per second: production's load; whether the guest could step at all; the rollout "
            "tokens that the node agent granted to each step; the harvested tokens. The gate "
            "closes when production needs its core and opens again when it does not.",
            plots.grant_and_rollouts(records),
        ),
        Plot(
            "Training steps of the RL job",
            "Each training step's time, stacked by phase (darkest: rollout), and the speed of its "
            "rollouts, on its dedicated engine alone and with harvesting. Both jobs start from the "
            "same seeds.",
            plots.training_steps(records),
        ),
    ]


def _narrow_plots(records: Sequence[Record], result: Result) -> list[Plot]:
    sent, dense = result.weights.bytes_sent, result.weights.bytes_dense
    share = wording.percent(sent / dense if dense else None)
    return [
        Plot(
            "Learning curves",
            "Mean reward per step; the band is two standard errors either way.",
            plots.reward(records),
        ),
        Plot(
            "Bytes of each weight version",
            f"Only changed values travel, exactly: {wording.size(sent)} instead of "
            f"{wording.size(dense)} over the run ({share}).",
            plots.bytes_per_version(records),
        ),
    ]


def _halves(checks: Sequence[ResultCheck]) -> list[Sequence[ResultCheck]]:
    middle = (len(checks) + 1) // 2
    return [checks[:middle], checks[middle:]]
