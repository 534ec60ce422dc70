"""The part of each tensor that this rank holds, as its trainer declares it.

Three forms: a plain tensor is held whole; a DTensor (FSDP2, tensor parallel) carries its mesh and
placements; a `ShardSlice` states the part explicitly, for Megatron-style parallelism. Never
communicates: among replicas within a DTensor's mesh the first one publishes.
"""

from dataclasses import dataclass
from typing import Any

import torch

from harvester.contracts.errors import ConfigError, Unsupported
from weightsync.layout.slices import SliceRecord


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """`tensor` is the part of a tensor of `shape` that begins at `offset` of dimension `dim`."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dim: int
    offset: int

    def record(self, name: str) -> SliceRecord:
        """The part as a slice record. Raises ConfigError if the part does not fit the whole."""
        lengths = tuple(self.tensor.shape)
        offsets = tuple(self.offset if d == self.dim else 0 for d in range(len(self.shape)))
        expected = tuple(
            length if d == self.dim else size
            for d, (length, size) in enumerate(zip(lengths, self.shape, strict=False))
        )
        within = 0 <= self.dim < len(self.shape) == len(lengths)
        if not within or lengths != expected or not _fits(offsets, lengths, self.shape):
            raise ConfigError(
                f"{name}: a part of shape {lengths} at {self.offset} of dimension {self.dim} does "
                f"not fit a tensor of shape {self.shape}"
            )
        return SliceRecord(name, tuple(self.shape), offsets, lengths)


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's published part of one tensor; `record` is None for the whole tensor."""

    tensor: torch.Tensor
    record: SliceRecord | None


def part_of(name: str, value: Any) -> Part | None:
    """This rank's part; None if another rank publishes it, or if the part is empty.

    Raises Unsupported for placements that a checkpoint cannot represent.
    """
    if isinstance(value, ShardSlice):
        return _part(value.tensor, value.record(name))
    if hasattr(value, "placements") and hasattr(value, "device_mesh"):
        return _part_of_dtensor(name, value)
    if not isinstance(value, torch.Tensor):
        raise Unsupported(f"{name} is a {type(value).__name__}: pass tensors or ShardSlices")
    return Part(value, None)


def _part(tensor: torch.Tensor, record: SliceRecord) -> Part | None:
    if tensor.numel() == 0 and not record.is_whole:
        return None
    return Part(tensor, None if record.is_whole else record)


def _part_of_dtensor(name: str, value: Any) -> Part | None:
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    shape = tuple(value.shape)
    offsets, lengths = [0] * len(shape), list(shape)
    # A strided placement was cut after those on its right (FSDP over tensor parallel).
    dims = range(len(value.placements))
    strided = {d for d in dims if hasattr(value.placements[d], "split_factor")}
    for mesh_dim in (*(d for d in dims if d not in strided), *sorted(strided, reverse=True)):
        placement = value.placements[mesh_dim]
        if placement.is_partial():
            raise Unsupported(f"{name} is a partial sum: reduce it before publishing")
        if placement.is_replicate():
            if coordinate[mesh_dim] != 0:
                return None
            continue
        dim = placement.dim
        chunk = -(-lengths[dim] // value.device_mesh.size(mesh_dim))
        start = min(coordinate[mesh_dim] * chunk, lengths[dim])
        offsets[dim] += start
        lengths[dim] = min(chunk, lengths[dim] - start)
    local = value.to_local()
    if tuple(local.shape) != tuple(lengths):
        raise Unsupported(
            f"{name}: placements {value.placements} say a part of {lengths}, here is "
            f"{tuple(local.shape)}; pass ShardSlices"
        )
    return _part(local, SliceRecord(name, shape, tuple(offsets), tuple(lengths)))


def _fits(offsets: tuple[int, ...], lengths: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(
        offset >= 0 and offset + length <= size
        for offset, length, size in zip(offsets, lengths, shape, strict=True)
    )
