"""Time that an anchor adds to a publish: `python -m benchmarks.weightsync.anchor_cost`.

A publisher whose every third version has an anchor publishes two states that differ in 1 % of the
elements by one unit in the last place, in turns: a publish with an anchor, the one that follows it
and waits for what is left of it, and one without. Between two publishes the trainer computes for
the given seconds, beside the thread that writes the anchor. Medians of what `publish` takes; each
ratio is over the publish without an anchor of the same turn: its median, the least and the most.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.testbed.reporting import report
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Publisher

State = dict[str, torch.Tensor]
PARAMETERS = 50_000_000
TENSORS = 24
STEPS_S = (1.0, 0.0)
TURNS = 12
_EVERY = 3
_MOVED_RATIO = 0.01
_PARTS = ("anchor", "after", "plain")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync.anchor_cost", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--directory", type=Path, help="of the store; else for temporary files")
    given = parser.parse_args()
    report(
        "weightsync.anchor_cost",
        lambda: measure(given.parameters, given.directory),
        given.json,
        engines=False,
    )


def measure(parameters: int = PARAMETERS, directory: Path | None = None) -> dict[str, Any]:
    cases = []
    for step_s in STEPS_S:
        cases.append(_case(parameters, step_s, directory))
        print(cases[-1], file=sys.stderr, flush=True)
    return {"parameters": parameters, "turns": TURNS, "cases": cases}


def _case(parameters: int, step_s: float, directory: Path | None) -> dict[str, Any]:
    states = _states(parameters)
    seconds: dict[str, list[float]] = {part: [] for part in _PARTS}
    with (
        tempfile.TemporaryDirectory(prefix="weights-", dir=directory) as root,
        Publisher(
            Path(root) / "store", versions=VersionSettings(anchor_every=_EVERY, keep_versions=1)
        ) as publisher,
    ):
        publisher.publish(states[0])
        # The first round compiles, or loads, what the others use.
        for number in range(-2 * _EVERY, _EVERY * TURNS):
            _compute(step_s)
            started = time.perf_counter()
            published = publisher.publish(states[(number + 1) % 2])
            taken_s = time.perf_counter() - started
            part = _PARTS[(number + 1) % _EVERY]
            if (published.bytes_anchor > 0) != (part == "anchor") or published.anchor_fault:
                raise AssertionError(f"version {published.version}: {published}")
            if number >= 0:
                seconds[part].append(taken_s)
    ratios = {
        part: [a / b for a, b in zip(seconds[part], seconds["plain"], strict=True)]
        for part in ("anchor", "after")
    }
    return {
        "step_s": step_s,
        **{f"{part}_s": round(statistics.median(taken), 4) for part, taken in seconds.items()},
        **{
            f"{part}_over_plain": [
                round(value, 2) for value in (statistics.median(found), min(found), max(found))
            ]
            for part, found in ratios.items()
        },
    }


def _states(parameters: int) -> tuple[State, State]:
    generator = torch.Generator().manual_seed(0)
    size = parameters // TENSORS
    states: tuple[State, State] = ({}, {})
    for n in range(TENSORS):
        name, tensor = f"layer.{n:02d}", 0.02 * torch.randn(size, generator=generator)
        moved = (torch.rand(size, generator=generator) < _MOVED_RATIO).short()
        states[0][name] = tensor.bfloat16()
        states[1][name] = (states[0][name].view(torch.int16) + moved).view(torch.bfloat16)
    return states


def _compute(seconds: float) -> None:
    work, ends = torch.ones(256, 256), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        torch.mm(work, work)


if __name__ == "__main__":
    main()
