"""`rosemux profile`: prints the step times that production's pulse has learned, for another slot.

It reads pages and changes nothing. It waits until the times are learned.
"""

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import yaml

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.page import (
    PageDirectory,
    PageFault,
    PageReader,
    ProductionModel,
    Pulse,
    Reading,
)
from harvester.policy.settings import SlotSettings

_POLL_S = 0.2
_WIDTH = 160


def profile(
    pages: Annotated[Path, typer.Option(help="Page directory of one slot.")],
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait until they are learned.")
    ] = 60.0,
    out: Annotated[Path | None, typer.Option(help="File to write it to as well.")] = None,
) -> None:
    """Print production's learned step times as the `profile` of a slot's policy."""
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
    text = _calibrations(directory)
    profiled = {**learned, "shapes": _shapes(directory)}
    text += yaml.safe_dump({"policy": {"profile": profiled}}, sort_keys=False, width=_WIDTH)
    typer.echo(text, nl=False)
    if out is not None:
        try:
            out.write_text(text)
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}") from error


def _learned(directory: PageDirectory) -> dict[str, float] | None:
    """The largest of every coefficient over the slot's pulses; None while any is unlearned.

    Raises ConfigError without a readable pulse.
    """
    names = directory.pulse_names()
    if not names:
        raise ConfigError(f"no pulse in {directory.path}: start production with its pulse first")
    most = ProductionModel()
    for name in names:
        path = directory.path / name
        reading = _read(directory, name)
        if reading.record is None:
            if reading.fault is PageFault.FOREIGN:
                raise ConfigError(f"{path} is no pulse")
            return None
        if reading.record.model_samples < SlotSettings().model_samples_min:
            return None
        most = most.upper(reading.record.model)
    learned: dict[str, float] = msgspec.to_builtins(most)
    return learned


def _shapes(directory: PageDirectory) -> list[str]:
    """Shapes of the engines that these times come from, so that no unlike engine uses them."""
    pulses = (_read(directory, name).record for name in directory.pulse_names())
    return sorted({pulse.shape for pulse in pulses if pulse is not None and pulse.shape})


def _calibrations(directory: PageDirectory) -> str:
    """Observed over predicted step times per pulse, as YAML comments."""
    lines = "# Observed over predicted; the prediction is the P90, so the goal is 1.00 there.\n"
    for name in directory.pulse_names():
        pulse = _read(directory, name).record
        if pulse is None:
            continue
        kinds = {"prefills": pulse.prefill_calibration, "decodes": pulse.decode_calibration}
        for kind, found in kinds.items():
            ratios = "none compared yet"
            if found.steps:
                quantiles = (found.p50_ratio, found.p90_ratio, found.p99_ratio)
                ratios = "P50 {:.2f}, P90 {:.2f}, P99 {:.2f}".format(*quantiles)
                ratios += f" of {found.steps}, {found.over_ratio:.0%} longer"
            lines += f"# {name} {kind}: {ratios}\n"
    return lines


def _read(directory: PageDirectory, name: str) -> Reading[Pulse]:
    path = directory.path / name
    return PageReader(path, Pulse, owners=frozenset({path.stat().st_uid})).read()
