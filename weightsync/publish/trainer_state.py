"""Input of a publish: a state dict, or an iterable of tensors, of which each rank may hold parts.

A state dict's tensors exist until the publish returns, so they are read in place and tied ones are
recognised by their storage. An iterable's tensor exists until the next one is requested: each is
copied and released, so that a trainer may gather layer by layer into one buffer. Accelerator
tensors are copied to the host one at a time.

A plain tensor is held whole; a DTensor (FSDP2, tensor parallel) carries its mesh and placements; a
`ShardSlice` states the part explicitly, for Megatron-style parallelism. Never communicates: among
replicas within a DTensor's mesh the first one publishes.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from harvester.contracts.errors import ConfigError, Unsupported
from weightsync.elements.bits import (
    Bits,
    Tensor,
    TensorSpec,
    address_of,
    bits_of,
    is_finite,
    memory_of,
    spec_of,
)
from weightsync.layout.shard import MAX_NAME_CHARS, RESERVED_NAMES
from weightsync.layout.slices import SliceRecord


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """`tensor` is the part of a tensor of `shape` that begins at `offset` of dimension `dim`."""

    tensor: Tensor
    shape: tuple[int, ...]
    dim: int
    offset: int

    def record(self, name: str) -> SliceRecord:
        """The part as a slice record. Raises ConfigError if the part does not fit the whole."""
        lengths = tuple(self.tensor.shape)
        offsets = tuple(self.offset if d == self.dim else 0 for d in range(len(self.shape)))
        cut = slice(self.dim, self.dim + 1)
        expected = (*self.shape[: cut.start], *lengths[cut], *self.shape[cut.stop :])
        within = 0 <= self.dim < len(self.shape) == len(lengths) and lengths == expected
        if not within or not 0 <= self.offset <= self.shape[self.dim] - lengths[self.dim]:
            raise ConfigError(
                f"{name}: a part of shape {lengths} at {self.offset} of dimension {self.dim} does "
                f"not fit a tensor of shape {self.shape}"
            )
        return SliceRecord(name, tuple(self.shape), offsets, lengths)


_NO_PAIR = "is no pair of name and tensor: pass a state dict, or `named_parameters()`"
Part: TypeAlias = tuple[Tensor, SliceRecord | None]
"""This rank's part of one tensor, and its record; None for the whole tensor."""


def part_of(name: str, value: Any) -> Part | None:
    """This rank's part; None if the part is empty or another rank's; raises Unsupported for
    placements that a checkpoint cannot represent."""
    if isinstance(value, ShardSlice):
        return _part(value.tensor, value.record(name))
    if hasattr(value, "placements") and hasattr(value, "device_mesh"):
        return _part_of_dtensor(name, value)
    if isinstance(value, np.ndarray):
        return value, None
    torch = sys.modules.get("torch")  # A tensor's trainer has imported it.
    if torch is None or not isinstance(value, torch.Tensor):
        raise Unsupported(
            f"{name} is a {type(value).__name__}: pass tensors, numpy arrays or ShardSlices"
        )
    if value.layout != torch.strided:
        raise Unsupported(f"{name} is {value.layout}: publish it dense")
    return value, None


def _part(tensor: Tensor, record: SliceRecord) -> Part | None:
    if not prod(tensor.shape) and not record.is_whole:
        if prod(record.shape) or any(record.offsets):
            return None
        # No slice tiles a tensor without elements: its first part is all of it.
        return tensor.reshape(record.shape), None
    return tensor, None if record.is_whole else record


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


PublishedState: TypeAlias = (
    "Mapping[str, Tensor | ShardSlice] | Iterable[tuple[str, Tensor | ShardSlice]]"
)
"""A state dict, or named parameters; an iterable may give several slices under one name."""


@dataclass(slots=True)
class Piece:
    """One entry of the next version, on any device."""

    entry: str
    spec: TensorSpec
    record: SliceRecord | None
    tensor: "Tensor | None"
    """The tensor; None once the next piece was requested, which frees memory for gathering it."""
    check_finite: bool = False

    def bits(self, *, own: bool) -> Bits:
        """Flat bits in host memory; with `own`, not the trainer's own memory. Raises ConfigError
        for elements that `check_finite` refuses."""
        if self.tensor is None:
            raise ValueError(f"{self.entry} was already released")
        tensor = self.tensor
        is_meta = not isinstance(tensor, np.ndarray) and tensor.device.type == "meta"
        if is_meta:
            raise Unsupported(f"{self.entry} is on the meta device: it has no values")
        if self.check_finite and not is_finite(tensor):
            raise ConfigError(f"{self.entry} has NaN or infinite elements: nothing is published")
        if isinstance(tensor, np.ndarray):
            return bits_of(np.array(tensor, order="C") if own else np.ascontiguousarray(tensor))
        host = tensor.detach()
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            host = host.cpu().contiguous()
        elif own:
            host = host.clone()
        try:
            return bits_of(host)
        except RuntimeError as error:
            # A subclass that wraps others, without memory of its own.
            raise Unsupported(f"{self.entry} is a {type(tensor).__name__}: {error}") from error


class TrainerState:
    """Iterate over it once. Only a state dict sets `pieces` and `ties` beforehand."""

    def __init__(
        self,
        state: PublishedState,
        *,
        is_adapter: bool = False,
        finds_ties: bool = True,
        check_finite: bool = False,
    ) -> None:
        if not isinstance(state, Mapping) and hasattr(state, "state_dict"):
            raise ConfigError("cannot publish a module: pass its `state_dict()`")
        if not isinstance(state, Iterable):
            raise ConfigError(f"cannot publish a {type(state).__name__}: pass a state dict")
        self.is_lasting = isinstance(state, Mapping)
        self._is_adapter = is_adapter
        self._finds_ties = finds_ties
        self._check_finite = check_finite
        self._coming: Iterable[tuple[str, Any]] = (
            # Names of other types have an order too, until they are refused.
            sorted(state.items(), key=lambda pair: str(pair[0]))
            if isinstance(state, Mapping)
            else state
        )
        self.pieces: list[Piece] = []
        self.ties: dict[str, str] = {}
        """Name to an earlier name that shares its storage."""
        if self.is_lasting:
            self._survey()

    def __iter__(self) -> Iterator[Piece]:
        if self.is_lasting:
            yield from self.pieces
            return
        for pair in self._coming:
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise ConfigError(f"a {type(pair).__name__} {_NO_PAIR}")
            piece = self._piece(*pair)
            del pair
            if piece is not None:
                yield piece
                piece.tensor = None

    def _survey(self) -> None:
        given = ((name, self._piece(name, value)) for name, value in self._coming)
        found = [(name, piece) for name, piece in given if piece is not None]
        if self._is_adapter and found and not any(".lora_" in name for name, _ in found):
            raise ConfigError("no tensor of an adapter (.lora_): pass the adapter's state dict")
        begins = Counter(map(_begin, (piece for _, piece in found) if self._finds_ties else ()))
        seen: dict[object, str] = {}
        for name, piece in found:
            # Most tensors share their start address with no other tensor.
            place = _place(piece) if begins[_begin(piece)] > 1 else None
            if place in seen:
                self.ties[name] = seen[place]
                continue
            if place is not None:
                seen[place] = name
            self.pieces.append(piece)

    def _piece(self, name: str, value: Any) -> Piece | None:
        if not isinstance(name, str):
            raise Unsupported(f"tensor name {name!r}: names are strings")
        part = part_of(name, value)
        if part is None:
            return None
        tensor, record = part
        entry = name if record is None else record.entry
        if not 0 < len(entry) <= MAX_NAME_CHARS or not _is_text(name):
            raise Unsupported(f"tensor name {name[:80]!r}: 1 to {MAX_NAME_CHARS} characters")
        if name in RESERVED_NAMES:
            raise Unsupported(f"tensor name {name!r}: the name is reserved for headers")
        if ".lora_" in name and not self._is_adapter:
            raise Unsupported(f"{name}: give LoRA adapters a store of their own (`adapter=`)")
        # A conjugated view has the memory of its tensor, with other values.
        if not isinstance(tensor, np.ndarray):
            tensor = tensor.resolve_conj().resolve_neg()
        return Piece(entry, spec_of(tensor, what=entry), record, tensor, self._check_finite)


def _is_text(name: str) -> bool:
    """Whether UTF-8, in which headers are written, has all of its characters."""
    return name.encode(errors="ignore").decode() == name


def _begin(piece: Piece) -> int:
    return 0 if piece.tensor is None else address_of(piece.tensor)


def _place(piece: Piece) -> object:
    """`memory_of` a whole tensor; None for a part."""
    return None if piece.tensor is None or piece.record else memory_of(piece.tensor)
