"""The part of a tensor that a rank holds, as torch reports it and as a trainer declares it."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from harvester.contracts.errors import ConfigError, Unsupported
from weightsync.layout.slices import SliceRecord, tiles
from weightsync.publish.trainer_state import ShardSlice, part_of


@dataclass
class Mesh:
    """A device mesh without processes, seen from one of its ranks."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.coordinate

    def size(self, dim: int) -> int:
        return self.shape[dim]


@dataclass
class Sharded:
    """A DTensor's interface, with the local part that torch would give this rank."""

    shape: tuple[int, ...]
    placements: tuple[Any, ...]
    device_mesh: Mesh

    def to_local(self) -> torch.Tensor:
        return torch.zeros(*self.where()[0])

    def where(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        coordinate = self.device_mesh.coordinate
        assert coordinate is not None
        shape, offsets = _compute_local_shape_and_global_offset(
            torch.Size(self.shape), self.device_mesh.shape, coordinate.__getitem__, self.placements
        )
        return tuple(shape), tuple(offsets)


PLACEMENTS = [
    (Shard(0),),
    (Shard(1),),
    (Replicate(),),
    (Replicate(), Shard(0)),
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(1, split_factor=2), Shard(1)),
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@given(rows=st.sampled_from([4, 8, 12]), columns=st.sampled_from([4, 8]))
def test_the_slices_of_all_ranks_tile_the_tensor_where_torch_says_they_are(
    placements: tuple[Any, ...], rows: int, columns: int
) -> None:
    mesh = (2, 2)[: len(placements)]
    found: list[SliceRecord | None] = []
    for coordinate in product(*map(range, mesh)):
        tensor = Sharded((rows, columns), placements, Mesh(mesh, coordinate))
        part = part_of("w", tensor)
        if part is None:
            assert any(p.is_replicate() and c for p, c in zip(placements, coordinate, strict=True))
            continue
        found.append(part[1])
        if part[1] is not None:
            assert (part[1].lengths, part[1].offsets) == tensor.where()
    if found == [None]:
        return
    assert tiles([record for record in found if record is not None])
    assert None not in found


@given(rows=st.integers(1, 9), ranks=st.integers(2, 5))
def test_uneven_shards_tile_and_a_rank_with_nothing_publishes_nothing(
    rows: int, ranks: int
) -> None:
    tensors = [Sharded((rows, 3), (Shard(0),), Mesh((ranks,), (rank,))) for rank in range(ranks)]
    parts = [part_of("w", tensor) for tensor in tensors]
    held = [part for part in parts if part is not None]
    assert sum(tensor.shape[0] for tensor, _ in held) == rows
    if len(held) > 1:
        assert tiles([record for _, record in held if record is not None])
    assert [part is None for part in parts] == [tensor.where()[0][0] == 0 for tensor in tensors]


def test_a_rank_outside_of_the_mesh_publishes_nothing() -> None:
    assert part_of("w", Sharded((4, 4), (Shard(0),), Mesh((2,), None))) is None


def test_a_partial_sum_is_not_published() -> None:
    with pytest.raises(Unsupported, match="w is a partial sum"):
        part_of("w", Sharded((4, 4), (Partial(),), Mesh((2,), (0,))))


def test_a_slice_in_words_is_where_it_says() -> None:
    part = part_of("w", ShardSlice(torch.zeros(4, 2), (4, 6), dim=1, offset=2))
    assert part is not None
    assert part[1] == SliceRecord("w", (4, 6), (0, 2), (4, 2))
    assert part[1].entry == "w[:, 2:4]"


@pytest.mark.parametrize(
    ("shape", "dim", "offset"),
    [
        ((4, 6), 1, 5),
        ((4, 6), 1, -1),
        ((5, 6), 1, 0),
        ((4, 6), 2, 0),
        ((4,), 0, 0),
        ((4, 2, 6), 2, 0),
        ((4, 6), -1, 0),
    ],
)
def test_a_slice_that_does_not_fit_is_a_mistake(
    shape: tuple[int, ...], dim: int, offset: int
) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        part_of("w", ShardSlice(torch.zeros(4, 2), shape, dim=dim, offset=offset))


def test_a_tensor_without_elements_is_published_once() -> None:
    """No slices tile it, so that a version without it would be complete."""
    parts = [
        part_of("w", ShardSlice(torch.zeros(2, 0), (4, 0), dim=0, offset=offset))
        for offset in (0, 2)
    ]
    assert parts[1] is None
    assert parts[0] is not None
    tensor, record = parts[0]
    assert (tuple(tensor.shape), record) == ((4, 0), None)


def test_a_value_that_is_no_tensor_is_named() -> None:
    with pytest.raises(Unsupported, match="w is a list"):
        part_of("w", [1.0])
