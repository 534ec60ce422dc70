"""Pause and host memory of a tensor-parallel rank, beside those of a whole engine.

`python -m benchmarks.weightsync.tensor_parallel --json PATH`. One rank of 2, 4 and 8, and a whole
engine, each in a process of its own, follow one store in turns. The models have vLLM's parallel
layers as far as weights go: fused projections, rows, columns and a vocabulary cut by rows, loaded
tensor by tensor; they derive nothing, so that the pause is writing and verifying alone, with the
verdict on a rank's sums that comes before. Host memory is what a process has beyond its model and
libraries.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.testbed.reporting import report
from benchmarks.weightsync.states import LARGE, Shape
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.ids import WeightVersion
from weightsync.encoding.codec import warm_up
from weightsync.layout import box_delta
from weightsync.publisher import Publisher
from weightsync.receive.rank_sums import SumJudge, without_boxes
from weightsync.transport.location import StoreRoot
from weightsync.vllm.engine_weights import KEEPING_LEVEL, EngineWeights
from weightsync.vllm.prepared_version import RequestedVersion
from weightsync.vllm.stager import StageState

State = dict[str, torch.Tensor]
RANKS = (2, 4, 8)
TURNS = 5
_TURNS_BEFORE = 2
"""A full version, and a first step that finds its ways cold."""
SHAPE = replace(LARGE, name="0.26B", layers=4)
STORE = "job"
_MOVED_RATIO = 0.005
"""Share of the elements that move up, and of those that move down."""
_STAGING_BYTES = 64 << 20
_FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
}
_COLUMNS = ("o_proj.weight", "down_proj.weight")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync.tensor_parallel")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--rank", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    shape = replace(SHAPE, layers=given.layers)
    if given.rank is not None:
        _serve(shape, given.rank[0], given.rank[1], given.root)
        return
    report(
        "weightsync.tensor_parallel",
        lambda: {"tp": measure(given.turns, shape)},
        given.json,
        engines=False,
    )


def measure(turns: int = TURNS, shape: Shape = SHAPE) -> list[dict[str, Any]]:
    """A whole engine, which is one rank of one, then ranks; medians over the turns.

    `pause_ratio`: pause for each held byte, over the whole engine's in the same turn.
    `host_copy_ratio`: memory that stays after an update, over what is held; the peaks are what the
    first version and the others take at most, a tensor in transit for each of two threads included.
    """
    with tempfile.TemporaryDirectory(prefix="weights-") as directory, ExitStack() as stack:
        root = Path(directory)
        states = steps(shape)
        publisher = stack.enter_context(Publisher(root / STORE))
        holders = [stack.enter_context(_holder(shape, ranks, root)) for ranks in (1, *RANKS)]
        for turn in range(_TURNS_BEFORE + turns):
            published = publisher.publish(next(states))
            first = turn % len(holders)
            for holder in holders[first:] + holders[:first]:
                holder.follow(published.version)
    return [holder.figures(holders[0]) for holder in holders]


@dataclass(slots=True)
class _Holder:
    """One process and its answers."""

    ranks: int
    process: subprocess.Popen[str]
    seen: list[dict[str, Any]]

    def follow(self, version: WeightVersion) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{version}\n")
        self.process.stdin.flush()
        self.seen.append(json.loads(self.process.stdout.readline()))

    @property
    def held_bytes(self) -> int:
        return int(self.seen[0]["held_bytes"])

    def figures(self, whole: "_Holder") -> dict[str, Any]:
        pauses = [seen["pause_s"] for seen in self.seen[_TURNS_BEFORE:]]
        ratios = [
            (pause / self.held_bytes) / (seen["pause_s"] / whole.held_bytes)
            for pause, seen in zip(pauses, whole.seen[_TURNS_BEFORE:], strict=True)
        ]
        return {
            "ranks": self.ranks,
            "held_bytes": self.held_bytes,
            "pause_ms": 1e3 * statistics.median(pauses),
            "pause_per_held_gb": 1e3 * statistics.median(pauses) / (self.held_bytes / 1e9),
            "pause_ratio": statistics.median(ratios),
            "pause_ratios": sorted(ratios),
            "stage_ms": 1e3
            * statistics.median(seen["stage_s"] for seen in self.seen[_TURNS_BEFORE:]),
            "first_s": self.seen[0]["stage_s"] + self.seen[0]["pause_s"],
            "host_copy_ratio": max(seen["kept_bytes"] for seen in self.seen) / self.held_bytes,
            "first_peak_ratio": self.seen[0]["peak_bytes"] / self.held_bytes,
            "step_peak_ratio": max(seen["peak_bytes"] for seen in self.seen[1:]) / self.held_bytes,
            "in_place": all(seen["in_place"] and not seen["reapplied"] for seen in self.seen),
        }


@contextmanager
def _holder(shape: Shape, ranks: int, root: Path) -> Iterator[_Holder]:
    command = [sys.executable, "-m", "benchmarks.weightsync.tensor_parallel"]
    command += ["--rank", str(min(1, ranks - 1)), str(ranks), "--root", str(root)]
    # Freed arrays go back to the kernel, so that what is counted lives.
    settings = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
    process = subprocess.Popen(
        [*command, "--layers", str(shape.layers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | settings,
    )
    try:
        yield _Holder(ranks, process, [])
    finally:
        process.communicate()


def _serve(shape: Shape, rank: int, ranks: int, root: Path) -> None:
    """Follow the versions that standard input names; one line of figures for each."""
    with closing(RankFollower(shape, rank, ranks, root)) as follower:
        for line in sys.stdin:
            print(json.dumps(follower.follow(WeightVersion(int(line)))), flush=True)


class RankFollower:
    """One rank, or with one of one a whole engine, that follows the store under `root`."""

    def __init__(self, shape: Shape, rank: int, ranks: int, root: Path) -> None:
        warm_up()
        box_delta.warm_up()
        self.model = RankModel(shape, rank, ranks)
        self._held_bytes = sum(parameter.nbytes for parameter in self.model.parameters())
        self._weights = EngineWeights(
            self.model,
            None,
            StoreRoot(str(root)),
            packed_ahead_bytes=0,
            staging_bytes=_STAGING_BYTES,
            sliced=ranks > 1,
        )
        self._judge, self._is_rank = SumJudge(), ranks > 1
        self._clock = MonotonicClock()
        self._before = _memory("VmRSS")
        _forget_peak()

    def follow(self, version: WeightVersion) -> dict[str, Any]:
        requested = RequestedVersion(store=STORE, version=version)
        started = self._clock.now()
        while self._weights.stage(requested).state is StageState.RUNNING:
            time.sleep(0.001)
        staged = self._clock.now()
        if self._is_rank:
            # All that the verdict costs but the calls of an engine's executor.
            words = without_boxes(self._weights.sums(requested), self._judge.known)
            self._weights.judge(self._judge.judged([words]))
        self._weights.load(requested)
        loaded = self._clock.now()
        self._weights.release()
        # Memory that an update leaves is freed in the background.
        self._weights.fall_asleep(KEEPING_LEVEL)
        gc.collect()
        seen = {
            "held_bytes": self._held_bytes,
            "stage_s": staged - started,
            "pause_s": loaded - staged,
            "kept_bytes": _memory("VmRSS") - self._before,
            "peak_bytes": _memory("VmHWM") - self._before,
            "in_place": self._weights.report()["in_place"],
            "reapplied": self._weights.report()["reapplied"],
        }
        _forget_peak()
        return seen

    def close(self) -> None:
        self._weights.close()


class RankModel(torch.nn.Module):
    """The weights of one rank, and a loader that cuts them as vLLM's parallel layers do."""

    def __init__(self, shape: Shape, rank: int, ranks: int) -> None:
        super().__init__()
        self._rank, self._ranks = rank, ranks
        self._places: dict[str, torch.Tensor] = {}
        sizes: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for name, size in shape.tensors():
            sizes.setdefault(_parameter(name), []).append((name, self._cut(name, size)))
        for number, parts in enumerate(sizes.values()):
            rows = sum(size[0] for _, size in parts)
            fused = torch.full((rows, *parts[0][1][1:]), 7.0, dtype=torch.bfloat16)
            self.register_parameter(f"held_{number}", torch.nn.Parameter(fused, False))
            first = 0
            for name, size in parts:
                self._places[name] = fused.narrow(0, first, size[0])
                first += size[0]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            place, dim = self._places[name], _dim(name)
            size = place.shape[dim or 0]
            place.copy_(tensor if dim is None else tensor.narrow(dim, self._rank * size, size))

    def _cut(self, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
        dim = _dim(name)
        return tuple(n // self._ranks if d == dim else n for d, n in enumerate(size))


def _parameter(name: str) -> str:
    """The parameter that a tensor of the checkpoint is a part of."""
    for part, fused in _FUSED.items():
        name = name.replace(part, fused)
    return name


def _dim(name: str) -> int | None:
    if name.endswith("norm.weight"):
        return None
    return 1 if name.endswith(_COLUMNS) else 0


def steps(shape: Shape) -> Iterator[State]:
    """States in which one element in a hundred moves by one unit in the last place."""
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(size, generator=generator).mul_(0.02).bfloat16()
        for name, size in shape.tensors()
    }
    while True:
        yield state
        for tensor in state.values():
            drawn = torch.rand(tensor.shape, generator=generator)
            tensor.view(torch.int16).add_((drawn < _MOVED_RATIO).short())
            tensor.view(torch.int16).sub_((drawn > 1 - _MOVED_RATIO).short())


def _forget_peak() -> None:
    """Make the kernel count VmHWM from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def _memory(field: str) -> int:
    """A line of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this kernel tells no {field}")


if __name__ == "__main__":
    main()
