"""Ranks of any shape follow deltas to the bits that their loader cuts from the whole tensors."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.elements.bits import UNSIGNED_NUMPY, TensorSpec, tensor_from_bits, torch_dtypes
from weightsync.publisher import Publisher
from weightsync.transport.location import StoreRoot
from weightsync.vllm.engine_weights import EngineWeights
from weightsync.vllm.prepared_version import RequestedVersion

State = dict[str, torch.Tensor]
Copies = Iterator[tuple[torch.Tensor, torch.Tensor]]
VERSIONS = 3
KINDS = (
    "vocabulary",
    "columns",
    "twice",
    "fused",
    "experts",
    "own experts",
    "transposed",
    "whole",
    "wide",
)


@dataclass(frozen=True, slots=True)
class Place:
    """How a rank has a tensor of a checkpoint."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    held: torch.Tensor
    copies: Callable[[torch.Tensor, torch.Tensor], Copies]
    """(part of `held`, part of the whole tensor) for each copy of a loader."""


class AnyRank(torch.nn.Module):
    """A loader as vLLM's: every tensor cut by its layer, copied into parameters."""

    def __init__(self, places: dict[str, Place]) -> None:
        super().__init__()
        self.places = places
        for number, place in enumerate(places.values()):
            place.held.fill_(7)
            self.register_parameter(f"held_{number}", torch.nn.Parameter(place.held, False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            for held, part in self.places[name].copies(self.places[name].held, tensor):
                held.copy_(part)

    def bits(self) -> list[bytes]:
        return [p.reshape(-1).view(torch.uint8).numpy().tobytes() for p in self.parameters()]


def rows(whole: int, rank: int, ranks: int) -> slice:
    """A rank's rows of a padded vocabulary: the last ranks may have none."""
    length = -(-whole // ranks)
    return slice(min(whole, rank * length), min(whole, (rank + 1) * length))


@st.composite
def places(draw: st.DrawFn, dtype: torch.dtype, rank: int, ranks: int) -> Place:
    kind = draw(st.sampled_from(KINDS))
    size, width = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    mine = slice(rank * size, (rank + 1) * size)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    if kind == "vocabulary":
        total = draw(st.integers(1, 60))
        cut = rows(total, rank, ranks)
        count = cut.stop - cut.start
        return Place(
            (total, width),
            empty(-(-total // ranks), width),
            lambda held, whole: iter([(held[:count], whole[cut])]),
        )
    if kind in {"columns", "twice"}:
        times = 1 + (kind == "twice")
        return Place(
            (width, ranks * size),
            empty(width, size),
            lambda held, whole: iter([(held, whole.narrow(1, rank * size, size))] * times),
        )
    if kind == "fused":
        # Query, key and value in one tensor, of which a rank has rows of each.
        sizes = [size, draw(st.integers(1, 3)), draw(st.integers(1, 3))]

        def parts(held: torch.Tensor, whole: torch.Tensor) -> Copies:
            there = here = 0
            for part in sizes:
                yield held[here : here + part], whole[there + rank * part :][:part]
                there, here = there + ranks * part, here + part

        return Place((ranks * sum(sizes), width), empty(sum(sizes), width), parts)
    if kind == "experts":
        # One after another: of each a rank has rows or columns.
        experts, dim = draw(st.integers(1, 4)), draw(st.integers(1, 2))
        shape = [experts, 3, width]
        shape[dim] = size
        whole_shape = [n * ranks if d == dim else n for d, n in enumerate(shape)]
        return Place(
            tuple(whole_shape),
            empty(*shape),
            lambda held, whole: iter(
                (held[e], whole[e].narrow(dim - 1, rank * size, size)) for e in range(experts)
            ),
        )
    if kind == "own experts":
        return Place(
            (ranks * size, 2, width),
            empty(size, 2, width),
            lambda held, whole: iter([(held, whole[mine])]),
        )
    if kind == "transposed":
        return Place(
            (ranks * size, width),
            empty(width, size),
            lambda held, whole: iter([(held.t(), whole[mine])]),
        )
    shape = draw(st.sampled_from([(), (width,), (size, width)]))
    held = empty(*shape, dtype=torch.float64 if kind == "wide" else dtype)
    return Place(shape, held, lambda held, whole: iter([(held, whole)]))


@st.composite
def ranks(draw: st.DrawFn) -> tuple[dict[str, TensorSpec], Callable[[], AnyRank]]:
    """A checkpoint's tensors, and one rank of it that is made anew with every call."""
    count = draw(st.integers(1, 8))
    rank = draw(st.integers(0, count - 1))
    found = {"norm": Place((3,), torch.empty(3), lambda held, whole: iter([(held, whole)]))}
    layout = {"norm": TensorSpec("F32", (3,))}
    for number in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(["BF16", "F8_E4M3", "F32"]))
        name = f"layers.{number}.weight"
        found[name] = draw(places(torch_dtypes()[dtype], rank, count))
        layout[name] = TensorSpec(dtype, found[name].shape)

    def made() -> AnyRank:
        return AnyRank(
            {
                name: Place(place.shape, torch.empty_like(place.held), place.copies)
                for name, place in found.items()
            }
        )

    return layout, made


def states(layout: dict[str, TensorSpec], random: np.random.Generator) -> Iterator[State]:
    """Versions in which some tensors stay, and some elements of the others change by little or by
    much; all are finite."""
    held = {
        name: random.integers(0, 100, spec.elements).astype(UNSIGNED_NUMPY[spec.width_bytes])
        for name, spec in layout.items()
    }
    for _ in range(VERSIONS):
        yield {name: tensor_from_bits(held[name].copy(), spec) for name, spec in layout.items()}
        for name, bits in held.items():
            hit = random.random(bits.size) < random.choice([0.0, 0.03, 0.3])
            step = random.choice([1, 2, 13], bits.size, p=[0.8, 0.15, 0.05])
            held[name] = (bits + (hit * step).astype(bits.dtype)) & bits.dtype.type(0x3F)


@settings(deadline=None, max_examples=25)
@given(checkpoint=ranks(), seed=st.integers(0, 1 << 16))
def test_a_rank_has_the_bits_that_its_loader_cuts_from_the_whole_tensors(
    checkpoint: tuple[dict[str, TensorSpec], Callable[[], AnyRank]], seed: int
) -> None:
    layout, made = checkpoint
    rank = made()
    with (
        tempfile.TemporaryDirectory() as directory,
        Publisher(Path(directory) / "job") as publisher,
    ):
        weights = EngineWeights(rank, None, StoreRoot(directory), packed_ahead_bytes=0, sliced=True)
        with closing(weights):
            for state in states(layout, np.random.default_rng(seed)):
                published = publisher.publish(state)
                applied = weights.load(RequestedVersion(store="job", version=published.version))
                loaded = made()
                loaded.load_weights(state.items())
                assert rank.bits() == loaded.bits()
                assert applied.state_hash == published.state_hash
                assert applied.from_full == (published.version == 1)
            assert weights.report()["in_place"]
            assert weights.report()["reapplied"] == 0
