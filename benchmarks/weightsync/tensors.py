"""Cost per tensor, however small: `python -m benchmarks.weightsync.tensors --json PATH`.

A state of many tensors of 1 KiB, as routers, norms and adapters of a large mixture have them, goes
through publisher and receiver step by step. The results are microseconds for each tensor of the
state: the loops over elements are next to nothing, and the rest is the work done once per
tensor. In the last case nothing changes but one tensor.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.testbed.reporting import report
from harvester.contracts.ids import WeightVersion
from weightsync.publisher import Publisher
from weightsync.receive.staged import check_state
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

TENSORS = 20_000
ELEMENTS = 512
STEPS = 5
CHANGED_RATIOS = (0.01, 0.05)
"""Share of the elements that move by one unit in the last place."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync.tensors", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    report(
        "weightsync.tensors",
        lambda: measure(given.tensors, given.steps),
        given.json,
        engines=False,
    )


def measure(tensors: int = TENSORS, steps: int = STEPS) -> dict[str, Any]:
    """Medians over the steps, two threads. `apply_us` has what `verify_us` measures again in it."""
    cases = [
        _case(f"{ratio:.0%} of all", tensors, tensors, ratio, steps) for ratio in CHANGED_RATIOS
    ]
    cases.append(_case("one tensor", tensors, 1, 1.0, steps))
    return {"tensors": tensors, "elements": ELEMENTS, "cases": cases}


def _case(name: str, tensors: int, moving: int, ratio: float, steps: int) -> dict[str, Any]:
    state = _state(tensors)
    target = TensorTarget({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    generator = torch.Generator().manual_seed(1)
    found: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="weights-") as directory,
        Publisher(Path(directory) / "store") as publisher,
        closing(Receiver(Path(directory) / "store")) as receiver,
    ):
        current = receiver.sync(None, publisher.publish(state).version, target).version
        for _ in range(1 + steps):
            _train(list(state.values())[:moving], ratio, generator)
            current, seconds = _step(publisher, receiver, current, state, target)
            for what, taken in seconds.items():
                found.setdefault(what, []).append(1e6 * taken / tensors)
    # The first step compiles or loads what the later ones use.
    medians = {what: round(statistics.median(taken[1:]), 2) for what, taken in found.items()}
    return {"name": name} | medians


def _step(
    publisher: Publisher,
    receiver: Receiver,
    current: WeightVersion,
    state: dict[str, torch.Tensor],
    target: TensorTarget,
) -> tuple[WeightVersion, dict[str, float]]:
    """One version published and taken; seconds of each part."""
    seconds: dict[str, float] = {}
    with _timed(seconds, "publish_us"):
        version = publisher.publish(state).version
    with _timed(seconds, "stage_us"):
        staged = receiver.prepare(current, version)
    with _timed(seconds, "apply_us"):
        receiver.apply(staged, target)
    with ThreadPoolExecutor(2) as pool, _timed(seconds, "verify_us"):
        check_state(staged.expected, staged.layout, target.bits, pool)
    return version, seconds


@contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    gc.collect()
    started = time.perf_counter()
    yield
    seconds[what] = time.perf_counter() - started


def _state(tensors: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{n // 500}.mlp.experts.{n % 500}.weight": (
            0.02 * torch.randn(ELEMENTS, generator=generator)
        ).bfloat16()
        for n in range(tensors)
    }


def _train(tensors: list[torch.Tensor], ratio: float, generator: torch.Generator) -> None:
    """Moves elements by one unit in the last place, up or down."""
    for tensor in tensors:
        hit = torch.rand(ELEMENTS, generator=generator) < ratio
        sign = 2 * torch.randint(0, 2, (ELEMENTS,), generator=generator) - 1
        tensor.view(torch.int16).add_((hit * sign).short())


if __name__ == "__main__":
    main()
