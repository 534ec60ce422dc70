"""The part of a checkpoint that a holder of weights has: a rank's share of a parallel engine.

    Names(lambda name: ...)                    pipeline and expert parallel: whole tensors
    TensorParallel(rank, ranks, dim_of)        one box of each tensor that is cut

Decides nothing about byte offsets; held_parts.py does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from harvester.contracts.errors import ConfigError
from weightsync.elements.bits import TensorSpec
from weightsync.layout.slices import SliceRecord


class Selection(Protocol):
    def box(self, name: str, spec: TensorSpec) -> SliceRecord | None:
        """The held box of a tensor; None if no part is held."""
        ...


@dataclass(frozen=True, slots=True)
class Names:
    """Whole tensors, as held by a pipeline stage or a rank of an expert-parallel group."""

    holds: Callable[[str], bool]

    def box(self, name: str, spec: TensorSpec) -> SliceRecord | None:
        return whole_box(name, spec) if self.holds(name) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """The rank's run of each tensor along a dimension; all runs but the last ones are equal.

    `dim_of`: the dimension that a tensor is cut along, None where every rank has all of it.
    `within` restricts the tensors, for a rank of several kinds of parallelism.
    """

    rank: int
    ranks: int
    dim_of: Callable[[str], int | None]
    within: Selection | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"rank {self.rank} of {self.ranks}: ranks count from 0")

    def box(self, name: str, spec: TensorSpec) -> SliceRecord | None:
        if self.within is not None and self.within.box(name, spec) is None:
            return None
        dim = self.dim_of(name)
        if dim is None:
            return whole_box(name, spec)
        if not 0 <= dim < len(spec.shape):
            raise ConfigError(f"{name} of shape {spec.shape} has no dimension {dim} to cut along")
        size = spec.shape[dim]
        length = -(-size // self.ranks)
        offset = min(self.rank * length, size)
        offsets = tuple(offset if d == dim else 0 for d in range(len(spec.shape)))
        lengths = tuple(
            min(length, size - offset) if d == dim else n for d, n in enumerate(spec.shape)
        )
        return SliceRecord(name, spec.shape, offsets, lengths) if lengths[dim] else None


def whole_box(name: str, spec: TensorSpec) -> SliceRecord:
    return SliceRecord(name, spec.shape, (0,) * len(spec.shape), spec.shape)
