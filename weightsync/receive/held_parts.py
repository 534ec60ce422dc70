"""The part of a checkpoint that a holder has, as boxes of tensors and as entries of a store.

    Names(lambda name: ...)                    pipeline and expert parallel: whole tensors
    TensorParallel(rank, ranks, dim_of)        one box of each tensor that is cut

An entry is a whole tensor or a slice that one of the trainer's ranks published. Never reads a byte.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Protocol

from harvester.contracts.errors import ConfigError
from weightsync.elements.bits import Layout, TensorSpec
from weightsync.encoding.delta import Delta
from weightsync.layout.slices import CutDelta, SlicedDelta, SliceRecord, Slicing
from weightsync.transport.ranges import ByteSpan

MIN_RUN_BYTES = 256 << 10
"""Runs shorter than this are not worth a separate request."""


class Selection(Protocol):
    def box(self, name: str, spec: TensorSpec) -> SliceRecord | None:
        """The held box of a tensor; None if no part is held."""


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


@dataclass(frozen=True, slots=True)
class EntryPart:
    """The held part of one entry."""

    entry: str
    within: SliceRecord
    """The part as a box of the entry."""
    of: SliceRecord
    """The part as a box of the held part of the tensor."""

    def placed(self, delta: Delta) -> Delta:
        """The entry's delta, applied to the held part of the tensor."""
        if not self.within.is_whole:
            delta = CutDelta(self.within, delta)
        return delta if self.of.is_whole else SlicedDelta(self.of, delta)


@dataclass(frozen=True, slots=True)
class HeldParts:
    """A holder's part of a checkpoint; `boxes` has the held box of each tensor."""

    whole: Layout
    """The checkpoint's tensors."""
    slicing: Slicing
    boxes: Mapping[str, SliceRecord]
    entries: Layout = field(default_factory=dict)
    """All entries of the store."""
    parts: Mapping[str, EntryPart] = field(default_factory=dict)
    """The held part of each entry that is held at least in part, by entry name."""

    @property
    def is_everything(self) -> bool:
        return len(self.boxes) == len(self.whole) and not self.cut

    @property
    def cut(self) -> frozenset[str]:
        """Tensors that are held in part only."""
        return frozenset(name for name, box in self.boxes.items() if not box.is_whole)

    def layout(self) -> dict[str, TensorSpec]:
        """Names and specs of the held parts."""
        return {
            name: TensorSpec(self.whole[name].dtype, box.lengths)
            for name, box in self.boxes.items()
        }

    def by_tensor(self) -> dict[str, list[EntryPart]]:
        found: dict[str, list[EntryPart]] = {name: [] for name in self.boxes}
        for part in self.parts.values():
            found[part.of.tensor].append(part)
        return found

    def uncut_slicing(self) -> Slicing:
        """The entries that are slices of tensors held whole."""
        cut = self.cut
        return Slicing(
            {
                entry: record
                for entry, record in self.slicing.records.items()
                if record.tensor in self.boxes and record.tensor not in cut
            }
        )


def everything(whole: Layout, slicing: Slicing) -> HeldParts:
    return _cut_up(whole, slicing, {name: whole_box(name, spec) for name, spec in whole.items()})


def held_parts(whole: Layout, slicing: Slicing, selection: Selection | None) -> HeldParts:
    """Raises ConfigError if a selection names a part that does not exist, or selects nothing."""
    if selection is None:
        return everything(whole, slicing)
    boxes = {}
    for name, spec in whole.items():
        box = selection.box(name, spec)
        if box is None:
            continue
        if (box.tensor, box.shape) != (name, spec.shape) or not _is_inside(box):
            raise ConfigError(f"{name} of shape {spec.shape} has no part {box}")
        boxes[name] = box
    if not boxes:
        raise ConfigError("nothing of this checkpoint is selected")
    return _cut_up(whole, slicing, boxes)


def runs(box: SliceRecord, width_bytes: int) -> Iterator[ByteSpan]:
    """The byte spans of a box of a tensor, in order; gaps not worth a request are included."""
    strides = element_strides(box.shape)
    cut = [d for d, size in enumerate(box.shape) if box.lengths[d] != size]
    if not cut:
        yield ByteSpan(0, prod(box.shape) * width_bytes)
        return
    inner = cut[-1]
    run_bytes = box.lengths[inner] * strides[inner] * width_bytes
    if run_bytes < MIN_RUN_BYTES:
        yield bounds(box, width_bytes)
        return
    outer = (range(o, o + n) for o, n in zip(box.offsets[:inner], box.lengths[:inner], strict=True))
    for place in product(*outer):
        at = (*place, box.offsets[inner])
        start = sum(i * stride for i, stride in zip(at, strides, strict=False)) * width_bytes
        yield ByteSpan(start, start + run_bytes)


def bounds(box: SliceRecord, width_bytes: int) -> ByteSpan:
    """The span from the first to the last byte of a box of a tensor."""
    if prod(box.lengths) == 0:
        return ByteSpan(0, 0)
    pairs = list(zip(box.offsets, box.lengths, element_strides(box.shape), strict=True))
    first = sum(offset * stride for offset, _, stride in pairs)
    last = sum((offset + length - 1) * stride for offset, length, stride in pairs)
    return ByteSpan(first * width_bytes, (last + 1) * width_bytes)


def element_strides(shape: tuple[int, ...]) -> list[int]:
    """Strides in elements, per dimension, of a contiguous tensor."""
    return [prod(shape[d + 1 :]) for d in range(len(shape))]


def _cut_up(whole: Layout, slicing: Slicing, boxes: Mapping[str, SliceRecord]) -> HeldParts:
    entries = slicing.entries(whole)
    parts: dict[str, EntryPart] = {}
    for entry, spec in entries.items():
        stored = slicing.records.get(entry) or whole_box(entry, spec)
        box = boxes.get(stored.tensor)
        part = None if box is None else _overlap(entry, stored, box)
        if part is not None:
            parts[entry] = part
    return HeldParts(whole, slicing, boxes, entries, parts)


def _overlap(entry: str, stored: SliceRecord, box: SliceRecord) -> EntryPart | None:
    """The overlap of an entry and a box of the same tensor; None if it is empty."""
    pairs = list(zip(stored.offsets, stored.lengths, box.offsets, box.lengths, strict=True))
    starts = tuple(max(so, bo) for so, _, bo, _ in pairs)
    stops = tuple(min(so + sn, bo + bn) for so, sn, bo, bn in pairs)
    lengths = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    is_empty = any(n <= 0 for n in lengths)
    if is_empty and not (stored.is_whole and box.is_whole):
        return None
    return EntryPart(
        entry,
        SliceRecord(entry, stored.lengths, _less(starts, stored.offsets), lengths),
        SliceRecord(box.tensor, box.lengths, _less(starts, box.offsets), lengths),
    )


def _less(places: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(place - offset for place, offset in zip(places, offsets, strict=True))


def _is_inside(box: SliceRecord) -> bool:
    if not len(box.offsets) == len(box.lengths) == len(box.shape):
        return False
    return all(
        offset >= 0 and (length > 0 or length == size) and offset + length <= size
        for offset, length, size in zip(box.offsets, box.lengths, box.shape, strict=True)
    )
