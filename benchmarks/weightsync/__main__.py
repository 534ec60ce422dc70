"""Weight sync against the formats and paths of other systems: bytes, speed, pauses, faults.

`python -m benchmarks.weightsync --json PATH [--old DIR --new DIR] [--only PART ...]`; see README.md
beside this file.
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.testbed.gpu_hardware import find_hardware
from benchmarks.testbed.hardware import Hardware, add_hardware_option
from benchmarks.testbed.partial_result import PartialResult
from benchmarks.testbed.reporting import report
from benchmarks.weightsync import catch_up
from benchmarks.weightsync.contenders import CONTENDERS
from benchmarks.weightsync.race import raced
from benchmarks.weightsync.states import (
    LARGE,
    SMALL,
    Pair,
    adam_step,
    checkpoints,
    consecutive,
    trained_step,
)
from harvester.contracts.errors import ConfigError
from weightsync.encoding.codec import warm_up

PARTS = ("codecs", "vllm", "tp", "fanout", "faults", "memory")
_MODULES = {"vllm": "engine", "tp": "tensor_parallel"}
LEARNING_RATES = (1e-6, 3e-6, 1e-5, 1e-3)
TRAINED = "trained"
SHAPES = {shape.name: shape for shape in (SMALL, LARGE)}
_TURNS = 5
_TURNS_OF_LARGE = 3
_LARGE_BYTES = 1 << 30
_PAIRS_OF_A_STORE = 3
DEMO_STORE = Path("out/demo/weights/harvest")
"""Store that `make demo` leaves; used if present."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--old", type=Path, help="a checkpoint directory; with --new")
    parser.add_argument("--new", type=Path, help="its successor")
    parser.add_argument(
        "--store", type=Path, help=f"a weight store's steps; else synthetic ones and {DEMO_STORE}'s"
    )
    parser.add_argument(
        "--shape",
        choices=(*SHAPES, TRAINED),
        nargs="+",
        default=[*SHAPES, TRAINED],
        help="sizes of synthetic steps, and real steps of small models",
    )
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    add_hardware_option(parser)
    given = parser.parse_args()
    if (given.old is None) != (given.new is None):
        parser.error("--old and --new belong together")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # The machine that is asked for is found, and checked, in the run.
    report("weightsync", lambda: measured(given), given.json, engines=False)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    hardware = find_hardware(given.hardware)
    hardware.check()
    partial = PartialResult(given.json, {"hardware": hardware.kind.value})
    for part in given.only:
        if part == "codecs":
            partial.keep(codecs(given))
            continue
        found = _measured_alone(part, hardware, partial, given.json)
        partial.keep({part: found})
        print(part, found, file=sys.stderr, flush=True)
    return partial.found


def _measured_alone(
    part: str, hardware: Hardware, partial: PartialResult, path: Path
) -> dict[str, Any] | list[dict[str, Any]]:
    """Runs one part; each imports its own needs: real engines, servers, namespaces."""
    module = import_module(f"benchmarks.weightsync.{_MODULES.get(part, part)}")
    of_engine: dict[str, Any] = {}
    if part == "vllm":
        of_engine = {
            "hardware": hardware,
            "logs": module.logs_beside(path),
            "keep": lambda found: partial.keep({part: found}),
        }
    found: dict[str, Any] | list[dict[str, Any]] = module.measure(**of_engine)
    return found


def codecs(given: argparse.Namespace) -> dict[str, Any]:
    """Every pair of states through every encoding."""
    warm_up()
    cases: list[dict[str, Any]] = []
    copies: list[float] = []
    for pair in _pairs(given):
        race = raced(pair, turns=_TURNS if pair.dense_bytes < _LARGE_BYTES else _TURNS_OF_LARGE)
        cases += race.cases()
        print(cases[-len(CONTENDERS)], file=sys.stderr, flush=True)
        copies.append(race.memcpy_gb_s)
    return {"cases": cases, "memcpy_gb_s": max(copies)}


def _pairs(given: argparse.Namespace) -> Iterator[Pair]:
    """Pairs one at a time: two states of the larger model are four gigabytes."""
    if given.old is not None:
        yield checkpoints(given.old, given.new)
    elif given.store is not None:
        yield from _stored(given.store)
    else:
        for shape in given.shape:
            if shape == TRAINED:
                yield from _trained()
                continue
            for learning_rate in LEARNING_RATES:
                yield adam_step(SHAPES[shape], learning_rate, seed=1)
        if DEMO_STORE.is_dir():
            yield from _stored(DEMO_STORE)


def _trained() -> Iterator[Pair]:
    for model in catch_up.MODELS:
        for learning_rate in catch_up.LEARNING_RATES:
            yield trained_step(model, learning_rate)


def _stored(store: Path) -> Iterator[Pair]:
    found = list(consecutive(store, at_most=_PAIRS_OF_A_STORE))
    if not found:
        raise ConfigError(f"{store} holds fewer than two versions")
    yield from found


if __name__ == "__main__":
    main()
