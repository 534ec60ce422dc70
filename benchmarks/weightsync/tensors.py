"""Cost per tensor, however small: `python -m benchmarks.weightsync.tensors --json PATH`.

A state of many tensors of 1 KiB, as routers, norms and adapters of a large mixture have them, goes
through publisher and receiver step by step. The results are microseconds for each tensor of the
state: the loops over elements are next to nothing, and the rest is the work done once per
tensor. In the last case nothing changes but one tensor. With `--ranks` the tensors of a mixture are
published in slices by so many ranks, threads of this process, and taken by one receiver.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.testbed.reporting import report
from harvester.contracts.ids import WeightVersion
from weightsync.layout.names import INDEX_FILE, Kind, VersionRef
from weightsync.layout.shard import shard_header
from weightsync.publish.settings import VersionSettings, WorkSettings
from weightsync.publish.trainer_state import ShardSlice
from weightsync.publisher import Publisher
from weightsync.receive.staged import check_state
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

TENSORS = 20_000
ELEMENTS = 512
STEPS = 5
MIXTURE_TENSORS = 18_867
"""Qwen3 30B A3B has as many: 48 layers, 128 experts."""
SLICE_ELEMENTS = 64
CHANGED_RATIOS = (0.01, 0.05)
"""Share of the elements that move by one unit in the last place."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync.tensors", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ranks", type=int, nargs="*", default=())
    given = parser.parse_args()
    report(
        "weightsync.tensors",
        lambda: measure(given.tensors, given.steps, given.ranks),
        given.json,
        engines=False,
    )


def measure(
    tensors: int = TENSORS, steps: int = STEPS, ranks: Sequence[int] = ()
) -> dict[str, Any]:
    """Medians over the steps, two threads. `apply_us` has what `verify_us` measures again in it.

    `sent_bytes` are all of a version's, `payload_bytes` those of its payloads.
    """
    if ranks:
        return {"tensors": MIXTURE_TENSORS, "ranks": [_of_ranks(count) for count in ranks]}
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
        Publisher(
            Path(directory) / "store", versions=VersionSettings(skip_deltas=False)
        ) as publisher,
        closing(Receiver(Path(directory) / "store")) as receiver,
    ):
        current = receiver.sync(None, publisher.publish(state).version, target).version
        for _ in range(1 + steps):
            _train(list(state.values())[:moving], ratio, generator)
            current, seconds = _step(publisher, receiver, current, state, target)
            for what, taken in seconds.items():
                found.setdefault(what, []).append(1e6 * taken / tensors)
        # The first step compiles or loads what the later ones use.
        sizes = _sizes(Path(directory) / "store", current)
    medians = {what: round(statistics.median(taken[1:]), 2) for what, taken in found.items()}
    return {"name": name} | medians | sizes


def _sizes(store: Path, version: WeightVersion) -> dict[str, int]:
    """Bytes of a delta's directory, and of the payloads in it."""
    directory = store / VersionRef(Kind.WEIGHT, version).directory
    sent = sum(path.stat().st_size for path in directory.iterdir())
    headers = [
        shard_header(np.memmap(path, dtype=np.uint8, mode="r"))
        for path in directory.glob("*.safetensors")
    ]
    payloads = sum(header.size_bytes(name) for header in headers for name in header.layout)
    return {"sent_bytes": sent, "payload_bytes": payloads}


def _of_ranks(ranks: int) -> dict[str, Any]:
    """A full version and a step of a mixture, each tensor cut by rows among all ranks."""
    generator = torch.Generator().manual_seed(0)
    state = {
        f"model.layers.{n // 400}.mlp.experts.{n % 400}.weight": (
            0.02 * torch.randn((ranks, SLICE_ELEMENTS), generator=generator)
        ).bfloat16()
        for n in range(MIXTURE_TENSORS)
    }
    held = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    found: dict[str, Any] = {"ranks": ranks, "entries": ranks * len(state)}
    with (
        tempfile.TemporaryDirectory(prefix="weights-") as directory,
        ExitStack() as stack,
        ThreadPoolExecutor(ranks) as pool,
    ):
        store = Path(directory) / "store"
        publishers = [
            stack.enter_context(
                Publisher(store, rank=rank, ranks=ranks, work=WorkSettings(threads=1))
            )
            for rank in range(ranks)
        ]
        receiver = stack.enter_context(closing(Receiver(store)))
        current = None
        for what in ("full", "delta"):
            seconds: dict[str, float] = {}
            with _timed(seconds, "publish_s"):
                shares = [_rows(state, rank) for rank in range(ranks)]
                done = list(pool.map(Publisher.publish, publishers, shares))
                version = done[0].version
            with _timed(seconds, "sync_s"):
                current = receiver.sync(current, version, TensorTarget(held)).version
            index = store / VersionRef(Kind.WEIGHT, version).directory / INDEX_FILE
            taken = {part: round(spent, 1) for part, spent in seconds.items()}
            found[what] = taken | _sizes(store, version) | {"index_bytes": index.stat().st_size}
            for tensor in state.values():
                hit = torch.rand(tensor.shape, generator=generator) < CHANGED_RATIOS[0]
                tensor.view(torch.int16).add_(hit.short())
    return found


def _rows(state: dict[str, torch.Tensor], rank: int) -> Iterator[tuple[str, ShardSlice]]:
    for name, tensor in state.items():
        yield name, ShardSlice(tensor[rank : rank + 1], tuple(tensor.shape), 0, rank)


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
