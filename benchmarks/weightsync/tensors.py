"""What a tensor costs however small it is: `python -m benchmarks.weightsync.tensors --json PATH`.

A state of many tensors of 1 KiB, as routers, norms and adapters of a large mixture have them, goes
through publisher and receiver step by step. What is told is microseconds for each tensor of the
state, so that the loops over elements are next to nothing and what is left is what is done once a
tensor. In the last case nothing changes but one tensor.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.reporting import report
from weightsync.publisher import Publisher
from weightsync.receive.staged import check_state
from weightsync.receiver import Receiver
from weightsync.target import TensorTarget

TENSORS = 20_000
ELEMENTS = 512
STEPS = 5
CHANGED_RATIOS = (0.01, 0.05)
"""Of the elements, by one unit in the last place."""


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
    """Medians over the steps, two threads; `apply_us` is `write_us` and `verify_us` together."""
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
        tempfile.TemporaryDirectory(prefix="weights-") as store,
        Publisher(Path(store) / "store") as publisher,
        ThreadPoolExecutor(2) as pool,
    ):
        receiver = Receiver(Path(store) / "store")
        current = receiver.sync(None, publisher.publish(state).version, target).version
        for _ in range(steps + 1):
            _train(list(state.values())[:moving], ratio, generator)
            times: dict[str, float] = {}
            published = _timed(times, "publish_us", lambda: publisher.publish(state))
            staged = _timed(
                times,
                "stage_us",
                lambda now=current, to=published.version: receiver.prepare(now, to),  # type: ignore[misc]
            )
            current = _timed(
                times, "apply_us", lambda ready=staged: receiver.apply(ready, target)
            ).version  # type: ignore[misc]
            _timed(
                times,
                "verify_us",
                lambda done=staged: check_state(done.expected, done.layout, target.bits, pool),  # type: ignore[misc]
            )
            for what, seconds in times.items():
                found.setdefault(what, []).append(1e6 * seconds / tensors)
        receiver.close()
    # The first step compiles or loads what the later ones use.
    return {"name": name} | {
        what: round(statistics.median(values[1:]), 2) for what, values in found.items()
    }


def _timed(times: dict[str, float], what: str, work: Callable[[], Any]) -> Any:
    gc.collect()
    started = time.perf_counter()
    result = work()
    times[what] = time.perf_counter() - started
    return result


def _state(tensors: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{n // 500}.mlp.experts.{n % 500}.weight": (
            0.02 * torch.randn(ELEMENTS, generator=generator)
        ).bfloat16()
        for n in range(tensors)
    }


def _train(tensors: list[torch.Tensor], ratio: float, generator: torch.Generator) -> None:
    """One unit in the last place, up or down."""
    for tensor in tensors:
        hit = torch.rand(ELEMENTS, generator=generator) < ratio
        sign = 2 * torch.randint(0, 2, (ELEMENTS,), generator=generator) - 1
        tensor.view(torch.int16).add_((hit * sign).short())


if __name__ == "__main__":
    main()
