"""A full checkpoint in the receiver's own copy, brought to the state that later deltas lead to.

Its tensors are read on demand; staging.py compares the digests.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harvester.contracts.errors import Stale
from weightsync.elements.batches import spread
from weightsync.elements.bits import (
    UNSIGNED_NUMPY,
    Bits,
    Layout,
    TensorSpec,
    bits_from_bytes,
    bytes_of,
)
from weightsync.encoding.delta import apply_all, checked_apply
from weightsync.layout.box_delta import box_deltas
from weightsync.layout.slices import SliceRecord
from weightsync.reading.memory_budget import MemoryBudget
from weightsync.reading.spool import StagedFile
from weightsync.receive.held_parts import EntryPart, bounds, element_strides
from weightsync.receive.stored_delta import StoredDelta
from weightsync.transport.ranges import ByteSpan

_HASHED_BYTES = 1 << 20
"""Memory that hashing takes, however large the entry."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A dense entry, from byte `start` of a staged file on."""

    file: StagedFile
    start: int
    spec: TensorSpec

    @property
    def whole(self) -> ByteSpan:
        return ByteSpan(self.start, self.start + self.spec.size_bytes)

    def around(self, box: SliceRecord) -> ByteSpan:
        """The span from the first to the last byte of a box of the entry."""
        inner = bounds(box, self.spec.width_bytes)
        return ByteSpan(self.start + inner.start, self.start + inner.stop)

    def view(
        self, data: npt.NDArray[np.uint8], box: SliceRecord
    ) -> npt.NDArray[np.unsignedinteger]:
        """The box in the bytes `around` it, sharing their memory."""
        flat = data.view(UNSIGNED_NUMPY[self.spec.width_bytes])
        strides = [n * self.spec.width_bytes for n in element_strides(self.spec.shape)]
        return np.lib.stride_tricks.as_strided(flat, box.lengths, strides)


class FullState(Mapping[str, Bits]):
    """Tensors by name, as their holder has them. `parts`: of which entries each is made."""

    def __init__(
        self,
        layout: Layout,
        parts: Mapping[str, Collection[EntryPart]],
        entries: dict[str, StoredEntry],
    ) -> None:
        self._layout = layout
        self._parts = parts
        self._entries = entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)

    def __contains__(self, name: object) -> bool:
        return name in self._layout

    def __getitem__(self, name: str) -> Bits:
        """The tensor in fresh memory or in the copy's own; callers must not change it."""
        spec = self._layout[name]
        alone = self._whole_entry(name)
        if alone is not None:
            return bits_from_bytes(alone.file.read(alone.whole), spec)
        bits = np.empty(spec.elements, dtype=UNSIGNED_NUMPY[spec.width_bytes])
        self.copy_into(name, bits)
        return bits

    def copy_into(self, name: str, bits: Bits) -> None:
        """Overwrites a tensor of the same size."""
        if bits.size != self._layout[name].elements:
            raise ValueError(f"{name} has {self._layout[name].elements} elements, not {bits.size}")
        alone = self._whole_entry(name)
        if alone is not None:
            alone.file.read_into(alone.start, bytes_of(bits))
            return
        for part in self._parts[name]:
            entry = self._entries[part.entry]
            around, box = entry.around(part.within), part.of.box(bits)
            if around.size_bytes == box.nbytes and box.flags.c_contiguous:
                entry.file.read_into(around.start, bytes_of(box.reshape(-1)))
            else:
                box[...] = entry.view(entry.file.read(around), part.within)

    def handed_over(self) -> dict[str, StoredEntry]:
        """The entries, for a later version to be made in their place: neither this state nor one
        made from it can be read any more."""
        entries = dict(self._entries)
        self._entries.clear()
        return entries

    def held(
        self, layout: Layout, parts: Mapping[str, Collection[EntryPart]] | None = None
    ) -> "FullState":
        """This state with the tensors of `layout` only, for a holder of `parts` of them."""
        return FullState(layout, self._parts if parts is None else parts, self._entries)

    def _whole_entry(self, name: str) -> StoredEntry | None:
        """The one entry that is all of a tensor as it is held."""
        if not self._entries:
            raise Stale("a later version took the place of this one in its copy: prepare it again")
        parts = self._parts[name]
        first = next(iter(parts))
        return self._entries[first.entry] if len(parts) == 1 and first.is_all else None


def advance(
    stored: Mapping[str, StoredEntry],
    deltas: Mapping[str, Sequence[StoredDelta]],
    parts: Mapping[str, Sequence[EntryPart]],
    pool: Executor,
    budget: MemoryBudget,
) -> None:
    """Apply every entry's deltas to the held parts of it; raises Corrupt."""

    def size_of(entry: str) -> int:
        largest = max(delta.lent_bytes for delta in deltas[entry])
        return 2 * stored[entry].spec.size_bytes + largest

    def work(entry: str) -> None:
        _advance(stored[entry], deltas[entry], [part.within for part in parts[entry]])

    for _ in spread(pool, work, list(deltas), size_of, limit_bytes=budget.lent_bytes):
        pass


def entry_digests(
    stored: Mapping[str, StoredEntry], pool: Executor, budget: MemoryBudget
) -> dict[str, str]:
    """xxh3-128 of every entry, all of which has to be in its file."""

    def digest(entry: str) -> str:
        return stored[entry].file.digest(stored[entry].whole)

    def size_of(entry: str) -> int:
        return min(stored[entry].spec.size_bytes, _HASHED_BYTES)

    found = spread(pool, digest, list(stored), size_of, limit_bytes=budget.lent_bytes)
    return dict(zip(stored, found, strict=True))


def _advance(stored: StoredEntry, deltas: Sequence[StoredDelta], boxes: list[SliceRecord]) -> None:
    file = stored.file
    if any(box.is_whole for box in boxes):
        data = file.read(stored.whole)
        apply_all(deltas, bits_from_bytes(data, stored.spec))
        file.write(stored.start, data)
        return
    arounds = [stored.around(box) for box in boxes]
    only = file.read(arounds[0]) if len(boxes) == 1 else None

    # All begin from the bits before: boxes of one holder may overlap.
    found = [
        stored.view(file.read(around) if only is None else only, box).flatten()
        for box, around in zip(boxes, arounds, strict=True)
    ]
    for delta in deltas:
        boxed = box_deltas(delta.decoded(), boxes, stored.spec.width_bytes)
        for bits, change in zip(found, boxed, strict=True):
            checked_apply(change, bits)
    for box, around, bits in zip(boxes, arounds, found, strict=True):
        # Read again: another box may lie between the columns of this one.
        data = file.read(around) if only is None else only
        view = stored.view(data, box)
        view[...] = bits.reshape(view.shape)
        file.write(around.start, data)
