"""Input of a publish: a state dict, or an iterable of tensors.

A state dict's tensors exist until the publish returns, so they are read in place and tied ones are
recognised by their storage. An iterable's tensor exists until the next one is requested: each is
copied and released, so that a trainer may gather layer by layer into one buffer. Accelerator
tensors are copied to the host one at a time. Decides names and specs; never compares a value.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from harvester.contracts.errors import ConfigError, Unsupported
from weightsync.elements.bits import Bits, TensorSpec, bits_of, spec_of
from weightsync.layout.shard import MAX_NAME_CHARS
from weightsync.layout.slices import SliceRecord
from weightsync.sharding import ShardSlice, part_of

State: TypeAlias = (
    Mapping[str, torch.Tensor | ShardSlice] | Iterable[tuple[str, torch.Tensor | ShardSlice]]
)
"""A state dict, or named parameters; an iterable may give several slices under one name."""


@dataclass(slots=True)
class Piece:
    """One entry of the next version, on any device."""

    entry: str
    spec: TensorSpec
    record: SliceRecord | None
    tensor: torch.Tensor | None
    """None once the next piece was requested, which frees memory for gathering it."""

    def bits(self, *, own: bool) -> Bits:
        """Flat bits in host memory; with `own`, not the trainer's own memory."""
        if self.tensor is None:
            raise ValueError(f"{self.entry} was already released")
        tensor = self.tensor
        if tensor.device.type == "meta":
            raise Unsupported(f"{self.entry} is on the meta device: it has no values")
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return bits_of(tensor.detach().cpu().contiguous())
        return bits_of(tensor.detach().clone() if own else tensor)


class Intake:
    """Iterate over it once. Only a state dict sets `pieces` and `ties` beforehand."""

    def __init__(self, state: State, *, is_adapter: bool = False, finds_ties: bool = True) -> None:
        self.is_lasting = isinstance(state, Mapping)
        self._is_adapter = is_adapter
        self._finds_ties = finds_ties
        self._coming: Iterable[tuple[str, Any]] = (
            sorted(state.items()) if isinstance(state, Mapping) else state
        )
        self.pieces: list[Piece] = []
        self.ties: dict[str, str] = {}
        """Name to an earlier name that shares its storage."""
        if self.is_lasting:
            if not state:
                raise ConfigError("an empty state dict: pass the model's parameters")
            self._survey()

    def __iter__(self) -> Iterator[Piece]:
        if self.is_lasting:
            yield from self.pieces
            return
        for name, value in self._coming:
            piece = self._piece(name, value)
            del value
            if piece is not None:
                yield piece
                piece.tensor = None

    def _survey(self) -> None:
        given = ((name, self._piece(name, value)) for name, value in self._coming)
        found = [(name, piece) for name, piece in given if piece is not None]
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
        part = part_of(name, value)
        if part is None:
            return None
        entry = name if part.record is None else part.record.entry
        if not 0 < len(entry) <= MAX_NAME_CHARS or name == "__metadata__":
            raise Unsupported(f"tensor name {name[:80]!r}: 1 to {MAX_NAME_CHARS} characters")
        if ".lora_" in name and not self._is_adapter:
            raise Unsupported(f"{name}: give LoRA adapters a store of their own (`adapter=`)")
        return Piece(entry, spec_of(part.tensor), part.record, part.tensor)


def _begin(piece: Piece) -> int:
    return 0 if piece.tensor is None else piece.tensor.data_ptr()


def _place(piece: Piece) -> object:
    """Equal for whole tensors that are the same view of the same memory; None for all others."""
    tensor = piece.tensor
    if tensor is None or piece.record or tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    return (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
