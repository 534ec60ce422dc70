"""The part of a checkpoint that a holder has, as boxes of tensors and as entries of a store.

    Names(lambda name: ...)                    pipeline and expert parallel: whole tensors
    TensorParallel(rank, ranks, dim_of)        one box of each tensor that is cut

A holder's tensors are boxes of the checkpoint's: all of a tensor or one box under the tensor's
name, several under the names of their boxes. An entry is a whole tensor or a slice that one of the
trainer's ranks published. Never reads a byte.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Protocol

from harvester.contracts.errors import ConfigError
from weightsync.elements.bits import Layout, TensorSpec, shared_spec
from weightsync.encoding.delta import Delta
from weightsync.layout.box_delta import box_deltas
from weightsync.layout.slices import SlicedDelta, SliceRecord, Slicing, tiles, whole_box
from weightsync.transport.ranges import ByteSpan

MIN_RUN_BYTES = 256 << 10
"""Runs shorter than this are not worth a separate request."""


class Selection(Protocol):
    def boxes(self, name: str, spec: TensorSpec) -> Sequence[SliceRecord]:
        """The held boxes of a tensor; none if no part is held."""


@dataclass(frozen=True, slots=True)
class Names:
    """Whole tensors, as held by a pipeline stage or a rank of an expert-parallel group."""

    holds: Callable[[str], bool]

    def boxes(self, name: str, spec: TensorSpec) -> Sequence[SliceRecord]:
        return (whole_box(name, spec),) if self.holds(name) else ()


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

    def boxes(self, name: str, spec: TensorSpec) -> Sequence[SliceRecord]:
        if self.within is not None and not self.within.boxes(name, spec):
            return ()
        dim = self.dim_of(name)
        if dim is None:
            return (whole_box(name, spec),)
        if not 0 <= dim < len(spec.shape):
            raise ConfigError(f"{name} of shape {spec.shape} has no dimension {dim} to cut along")
        size = spec.shape[dim]
        length = -(-size // self.ranks)
        offset = min(self.rank * length, size)
        offsets = tuple(offset if d == dim else 0 for d in range(len(spec.shape)))
        lengths = tuple(
            min(length, size - offset) if d == dim else n for d, n in enumerate(spec.shape)
        )
        return (SliceRecord(name, spec.shape, offsets, lengths),) if lengths[dim] else ()


@dataclass(frozen=True, slots=True)
class EntryPart:
    """The part of one entry that is in one of the holder's tensors."""

    entry: str
    within: SliceRecord
    """The part as a box of the entry."""
    of: SliceRecord
    """The part as a box of the holder's tensor."""

    @property
    def is_all(self) -> bool:
        """Whether the entry is the holder's tensor."""
        return self.within.is_whole and self.of.is_whole


def placed(parts: Sequence[EntryPart], delta: Delta, spec: TensorSpec) -> list[Delta]:
    """The delta of an entry of `spec`, for the holder's tensor of each of these parts of it."""
    boxes = [part.within for part in parts if not part.within.is_whole]
    boxed = iter(box_deltas(delta, boxes, spec.width_bytes) if boxes else ())
    found = [delta if part.within.is_whole else next(boxed) for part in parts]
    return [
        change if part.of.is_whole else SlicedDelta(part.of, change)
        for part, change in zip(parts, found, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class HeldParts:
    """A holder's part of a checkpoint."""

    whole: Layout
    """The checkpoint's tensors."""
    slicing: Slicing
    boxes: Mapping[str, SliceRecord]
    """The holder's tensors, by its names for them, as boxes of the checkpoint's."""
    entries: Layout = field(default_factory=dict)
    """All entries of the store."""
    parts: Mapping[str, Sequence[EntryPart]] = field(default_factory=dict)
    """The held parts of each entry that is held at least in part, by entry name."""

    @property
    def is_everything(self) -> bool:
        return len(self.boxes) == len(self.whole) and not self.partial

    @property
    def partial(self) -> frozenset[str]:
        """The holder's tensors that are a part of the checkpoint's only, or one of several places
        of a tensor: no digest is published under their names."""
        return frozenset(
            name for name, box in self.boxes.items() if not box.is_whole or name != box.tensor
        )

    def is_covered(self, entry: str) -> bool:
        """Whether the holder has all of an entry, in one box or in several that divide it, so that
        the entry's published digest verifies what it has of it."""
        boxes = [part.within for part in self.parts.get(entry, ())]
        return any(box.is_whole for box in boxes) or (bool(boxes) and tiles(boxes))

    @property
    def unseen(self) -> frozenset[str]:
        """The holder's tensors with a part of an entry that it has not all of: no published digest
        shows whether their bits are the trainer's."""
        cut = (parts for entry, parts in self.parts.items() if not self.is_covered(entry))
        return frozenset(part.of.tensor for parts in cut for part in parts)

    def layout(self) -> dict[str, TensorSpec]:
        """Names and specs of the holder's tensors."""
        return {
            name: shared_spec(self.whole[box.tensor].dtype, box.lengths)
            for name, box in self.boxes.items()
        }

    def by_tensor(self) -> dict[str, list[EntryPart]]:
        """The parts that each of the holder's tensors is made of."""
        found: dict[str, list[EntryPart]] = {name: [] for name in self.boxes}
        for parts in self.parts.values():
            for part in parts:
                found[part.of.tensor].append(part)
        return found

    def uncut_slicing(self) -> Slicing:
        """The entries that are slices of tensors held whole."""
        partial = self.partial
        return Slicing(
            {
                entry: record
                for entry, record in self.slicing.records.items()
                if record.tensor in self.boxes and record.tensor not in partial
            }
        )


def everything(whole: Layout, slicing: Slicing) -> HeldParts:
    return _cut_up(whole, slicing, {name: whole_box(name, spec) for name, spec in whole.items()})


def held_parts(whole: Layout, slicing: Slicing, selection: Selection | None) -> HeldParts:
    """Raises ConfigError if a selection names a part that does not exist, or selects nothing."""
    if selection is None:
        return everything(whole, slicing)
    boxes: dict[str, SliceRecord] = {}
    for name, spec in whole.items():
        found = selection.boxes(name, spec)
        for box in found:
            if (box.tensor, box.shape) != (name, spec.shape) or not _is_inside(box):
                raise ConfigError(f"{name} of shape {spec.shape} has no part {box}")
            held = held_name(box, found)
            if held in boxes or (held != name and held in whole):
                raise ConfigError(f"two parts of this checkpoint are named {held}")
            boxes[held] = box
    if not boxes:
        raise ConfigError("nothing of this checkpoint is selected")
    return _cut_up(whole, slicing, boxes)


def held_name(box: SliceRecord, boxes: Sequence[SliceRecord]) -> str:
    """A holder's name for one of the boxes of a tensor that it has."""
    return box.tensor if len(boxes) == 1 else box.entry


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
    held: dict[str, list[str]] = {}
    for name, box in boxes.items():
        held.setdefault(box.tensor, []).append(name)
    parts: dict[str, list[EntryPart]] = {}
    for entry, spec in entries.items():
        stored = slicing.records.get(entry) or whole_box(entry, spec)
        for name in held.get(stored.tensor, ()):
            part = _overlap(entry, stored, name, boxes[name])
            if part is not None:
                parts.setdefault(entry, []).append(part)
    return HeldParts(whole, slicing, boxes, entries, parts)


def _overlap(entry: str, stored: SliceRecord, name: str, box: SliceRecord) -> EntryPart | None:
    """The overlap of an entry and a holder's box of the same tensor; None if it is empty."""
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
        SliceRecord(name, box.lengths, _less(starts, box.offsets), lengths),
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
