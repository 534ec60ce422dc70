"""Tensors that are stored in slices: cuts a whole tensor into entries and reassembles it.

Each rank of a sharded trainer publishes its box of a tensor as a separate entry, so that no rank
ever holds the whole (docs/decisions/0025). Shards, encodings and the state hash work on entries;
everything else works on whole tensors. Only this module converts between the two.
"""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt

from harvester.contracts.errors import Corrupt
from weightsync.elements.batches import each
from weightsync.elements.bits import Bits, Layout, TensorSpec, checked_spec
from weightsync.elements.state_hash import digest_of
from weightsync.encoding.delta import Delta, checked_apply


class SliceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One box of a tensor: `lengths` elements from `offsets` on, per dimension."""

    tensor: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.lengths == self.shape

    @property
    def entry(self) -> str:
        """The entry's name as a publisher gives it; readers use the record, never the name."""
        ends = (o + n for o, n in zip(self.offsets, self.lengths, strict=True))
        spans = zip(self.offsets, ends, self.shape, strict=True)
        cuts = (":" if (o, end) == (0, size) else f"{o}:{end}" for o, end, size in spans)
        return f"{self.tensor}[{', '.join(cuts)}]"

    @property
    def index(self) -> tuple[slice, ...]:
        """The index by which an array in the tensor's shape gives the slice."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.lengths, strict=True))

    def box(self, whole: Bits) -> npt.NDArray[np.unsignedinteger]:
        """The slice of a whole tensor's bits, sharing memory, in the slice's shape."""
        return whole.reshape(self.shape)[self.index]

    def read(self, whole: Bits) -> Bits:
        """The slice's bits, flat: shared memory if contiguous, else a copy."""
        return np.ascontiguousarray(self.box(whole)).reshape(-1)


def whole_box(name: str, spec: TensorSpec) -> SliceRecord:
    return SliceRecord(name, spec.shape, (0,) * len(spec.shape), spec.shape)


@dataclass(frozen=True, slots=True)
class SlicedDelta:
    """The delta of one slice, applied to the whole tensor."""

    record: SliceRecord
    delta: Delta

    @property
    def elements(self) -> int:
        return prod(self.record.shape)

    def apply(self, bits: Bits, *, hashed: bool = False) -> str:
        box = self.record.box(bits)
        part = np.ascontiguousarray(box).reshape(-1)
        checked_apply(self.delta, part)
        if not np.shares_memory(part, bits):
            box[...] = part.reshape(box.shape)
        return digest_of(bits) if hashed else ""


@dataclass(frozen=True, slots=True)
class Slicing:
    """The entries of a checkpoint that are slices; empty if all tensors are stored whole."""

    records: Mapping[str, SliceRecord] = field(default_factory=dict)
    """Slice records by entry name."""

    def entries(self, layout: Layout) -> dict[str, TensorSpec]:
        """The entries of a checkpoint of `layout`."""
        cut = {record.tensor for record in self.records.values()}
        stored = {name: spec for name, spec in layout.items() if name not in cut}
        for entry, record in self.records.items():
            stored[entry] = TensorSpec(layout[record.tensor].dtype, record.lengths)
        return stored

    def whole(self, entries: Layout) -> Layout:
        """The checkpoint's tensors; raises Corrupt if slices do not tile their tensor exactly."""
        if not self.records:
            return entries
        whole = {name: spec for name, spec in entries.items() if name not in self.records}
        cut: dict[str, list[SliceRecord]] = {}
        for entry, record in self.records.items():
            spec = entries.get(entry)
            if spec is None or spec.shape != record.lengths:
                raise Corrupt(f"slice {entry!r} is stored as {spec}, described as {record.lengths}")
            described = checked_spec(spec.dtype, record.shape, what=f"tensor {record.tensor!r}")
            if whole.setdefault(record.tensor, described) != described or record.tensor in entries:
                raise Corrupt(f"tensor {record.tensor!r} is described in two ways")
            cut.setdefault(record.tensor, []).append(record)
        for name, records in cut.items():
            if not tiles(records):
                raise Corrupt(f"the {len(records)} slices of {name!r} do not tile {whole[name]}")
        return whole

    def by_tensor(self) -> dict[str, list[tuple[str, SliceRecord]]]:
        """The entries of every tensor that is stored in slices."""
        cut: dict[str, list[tuple[str, SliceRecord]]] = {}
        for entry, record in self.records.items():
            cut.setdefault(record.tensor, []).append((entry, record))
        return cut

    def digests(
        self, layout: Layout, read: Callable[[str], Bits], pool: Executor
    ) -> dict[str, str]:
        """xxh3-128 of every entry; each whole tensor is read once."""
        cut = self.by_tensor()

        def digest(name: str) -> dict[str, str]:
            bits = read(name)
            return digests_in(bits, cut[name]) if name in cut else {name: digest_of(bits)}

        digests: dict[str, str] = {}
        for found in each(pool, digest, sorted(layout), lambda name: layout[name].size_bytes):
            digests |= found
        return digests


def digests_in(whole: Bits, entries: Collection[tuple[str, SliceRecord]]) -> dict[str, str]:
    """xxh3-128 of the entries of a tensor that is stored in slices."""
    return {entry: digest_of(record.read(whole)) for entry, record in entries}


def tiles(records: Collection[SliceRecord]) -> bool:
    """Whether boxes of one tensor form a grid that covers it once."""
    shape = next(iter(records)).shape
    dims = range(len(shape))
    for record in records:
        if record.shape != shape or not len(record.offsets) == len(record.lengths) == len(shape):
            return False
    spans = [sorted({(r.offsets[d], r.lengths[d]) for r in records}) for d in dims]
    if len({record.offsets for record in records}) != len(records):
        return False
    return prod(map(len, spans)) == len(records) and all(_covers(spans[d], shape[d]) for d in dims)


def _covers(spans: list[tuple[int, int]], size: int) -> bool:
    at = 0
    for offset, length in spans:
        if offset != at or length < 1:
            return False
        at += length
    return at == size


def dims_of(box: SliceRecord) -> npt.NDArray[np.uint64]:
    """A row (stride, first, count, stride in the box) per dimension, in elements; dimensions that
    the box has whole are one with the dimension before, so that the last row is a run."""
    dims: list[list[int]] = []
    stride, held_stride, inner = 1, 1, 0
    for size, first, count in zip(
        reversed(box.shape), reversed(box.offsets), reversed(box.lengths), strict=True
    ):
        if dims and dims[0][2] == inner:
            dims[0][1:3] = [first * inner, count * inner]
            inner *= size
        else:
            dims.insert(0, [stride, first, count, held_stride])
            inner = size
        stride, held_stride = stride * size, held_stride * count
    return np.array(dims, np.uint64).reshape(-1, 4)
