"""`rosemux profile`: prints the step times that production's pulse has learned, for another slot.

It reads pages and changes nothing. It waits until the times are learned.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import yaml

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.page import PageDirectory, PageFault, PageReader, ProductionModel, Pulse
from harvester.platform.whole_file import write_whole
from harvester.policy.settings import SlotSettings

_POLL_S = 0.2
_WIDTH = 160


def profile(
    pages: Annotated[Path, typer.Option(help="One slot's page directory: /run/rosemux/slot0.")],
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait until they are learned.")
    ] = 60.0,
    out: Annotated[Path | None, typer.Option(help="File to write it to as well.")] = None,
) -> None:
    directory, clock = PageDirectory(pages), MonotonicClock()
    until_s = clock.now() + seconds
    while (learned := _learned(directory)) is None:
        if clock.now() >= until_s:
            raise Exhausted(
                f"{pages}: production's pulse has learned from too "
                f"few steps after {seconds:g} s; send it "
                "traffic, or wait longer with --seconds"
            )
        time.sleep(_POLL_S)
    pulses, times = learned
    # So that no unlike engine uses these times.
    shapes = sorted({pulse.shape for pulse in pulses.values() if pulse.shape})
    profiled = {**msgspec.to_builtins(times), "shapes": shapes}
    text = _calibrations(pulses)
    text += yaml.safe_dump({"policy": {"profile": profiled}}, sort_keys=False, width=_WIDTH)
    typer.echo(text, nl=False)
    if out is not None:
        write_whole(out, text)


def _learned(directory: PageDirectory) -> tuple[dict[str, Pulse], ProductionModel] | None:
    """The slot's pulses and the largest of every coefficient; None while any is unlearned.

    Raises ConfigError without a readable pulse.
    """
    names = directory.pulse_names()
    if not names:
        below = [each for each in directory.path.glob("*") if PageDirectory(each).pulse_names()]
        remedy = (
            f"name {' or '.join(map(str, sorted(below)))}"
            if below
            else ("start production with its pulse first")
        )
        raise ConfigError(f"no pulse in {directory.path}: {remedy}")
    most = ProductionModel()
    pulses = {}
    for name in names:
        path = directory.path / name
        reading = PageReader(path, Pulse, owners=frozenset({path.stat().st_uid})).read()
        if reading.record is None:
            if reading.fault is PageFault.FOREIGN:
                raise ConfigError(f"{path} is no pulse")
            return None
        if reading.record.model_samples < SlotSettings().model_samples_min:
            return None
        most = most.upper(reading.record.model)
        pulses[name] = reading.record
    return pulses, most


def _calibrations(pulses: Mapping[str, Pulse]) -> str:
    """Observed over predicted step times per pulse, as YAML comments."""
    lines = "# Observed over predicted; the prediction is the P90, so the goal is 1.00 there.\n"
    for name, pulse in pulses.items():
        kinds = {"prefills": pulse.prefill_calibration, "decodes": pulse.decode_calibration}
        for kind, found in kinds.items():
            ratios = "none compared yet"
            if found.steps:
                quantiles = (found.p50_ratio, found.p90_ratio, found.p99_ratio)
                ratios = "P50 {:.2f}, P90 {:.2f}, P99 {:.2f}".format(*quantiles)
                ratios += f" of {found.steps}, {found.over_ratio:.0%} longer"
            lines += f"# {name} {kind}: {ratios}\n"
    return lines
