"""Bytes that a parallel engine's rank reads per version: `python -m benchmarks.weightsync.parts`.

A mixture of 1 GB in bfloat16 with attention, experts, an embedding and a head; a full version, then
a step in which 1 % of the elements move by one unit in the last place. Every byte that the receiver
reads from the store is counted, indexes included, and its tensors are compared with the expected.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.weightsync.counted import CountedDirectory
from benchmarks.weightsync.memory import SETTINGS_BYTES
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import spec_of
from weightsync.publisher import Publisher
from weightsync.receive.held_parts import Names, Selection, TensorParallel
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

State = dict[str, torch.Tensor]
WIDTH = 1024
LAYERS = 8
EXPERTS = 16
_MOVED_RATIO = 0.01
_COLUMNS = ("down.weight", "out.weight")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync.parts", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--width", type=int, default=WIDTH)
    given = parser.parse_args()
    result = measure(given.width)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(width: int = WIDTH) -> dict[str, Any]:
    """`shares`: bytes held, and read of the full version and of the step; `whole` is everything."""
    first = _state(width)
    second = _moved(first)
    with tempfile.TemporaryDirectory(prefix="weights-") as directory:
        store = Path(directory) / "store"
        with Publisher(store) as publisher:
            publisher.publish(first)
            publisher.publish(second)
        shares = [
            {"share": name, **_pulled(store, share, second)} for name, share in _shares().items()
        ]
    return {"model_bytes": _size(first), "shares": shares}


def _pulled(store: Path, share: Selection | None, final: State) -> dict[str, Any]:
    source = CountedDirectory(store)
    expected = _part(final, share)
    held = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    receiver = Receiver(source, selection=share, staging_bytes=SETTINGS_BYTES[0])
    target = TensorTarget(held)
    receiver.sync(None, WeightVersion(1), target)
    full_bytes, source.read_total = source.read_total, 0
    receiver.sync(WeightVersion(1), WeightVersion(2), target)
    receiver.close()
    exact = all(torch.equal(_bits(held[name]), _bits(expected[name])) for name in expected)
    return {
        "held_bytes": _size(expected),
        "full_bytes": full_bytes,
        "delta_bytes": source.read_total,
        "exact": exact,
    }


def _shares() -> dict[str, Selection | None]:
    half = tuple(f"layers.{layer}." for layer in range(LAYERS // 2, LAYERS))
    quarter = tuple(f".experts.{expert}." for expert in range(EXPERTS // 4))
    return {
        "whole": None,
        "tp=2": TensorParallel(rank=1, ranks=2, dim_of=_dim),
        "tp=4": TensorParallel(rank=1, ranks=4, dim_of=_dim),
        "pp half": Names(lambda name: name.startswith((*half, "head."))),
        "ep quarter": Names(
            lambda name: ".experts." not in name or any(e in name for e in quarter)
        ),
    }


def _dim(name: str) -> int | None:
    """The split dimension in Megatron's way: columns of a block's outputs, rows of all else."""
    if name.endswith("norm.weight"):
        return None
    return 1 if name.endswith(_COLUMNS) else 0


def _part(state: State, share: Selection | None) -> State:
    if share is None:
        return state
    held = {}
    for name, tensor in state.items():
        for box in share.boxes(name, spec_of(tensor)):
            held[name] = tensor[box.index].contiguous()
    return held


def _state(width: int) -> State:
    """Words, attention and experts in the proportions of today's mixtures."""
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(0.02).bfloat16()

    state = {"embed.weight": drawn(32 * width, width), "head.weight": drawn(32 * width, width)}
    for layer in range(LAYERS):
        state[f"layers.{layer}.norm.weight"] = drawn(1, width).view(-1)
        state[f"layers.{layer}.qkv.weight"] = drawn(3 * width // 2, width)
        state[f"layers.{layer}.out.weight"] = drawn(width, width)
        for expert in range(EXPERTS):
            prefix = f"layers.{layer}.experts.{expert}"
            state[f"{prefix}.gate.weight"] = drawn(width, width)
            state[f"{prefix}.up.weight"] = drawn(width, width)
            state[f"{prefix}.down.weight"] = drawn(width, width)
    return state


def _moved(state: State) -> State:
    generator = torch.Generator().manual_seed(1)
    moved = {}
    for name, tensor in state.items():
        step = (torch.rand(tensor.shape, generator=generator) < _MOVED_RATIO).short()
        moved[name] = (tensor.view(torch.int16) + step).view(torch.bfloat16)
    return moved


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def _size(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


if __name__ == "__main__":
    main()
