"""Targets that keep a checkpoint in host memory: an engine whose storage cannot be read back whole.

ShadowTarget   the loader cannot be mapped: a full copy, passed on by vLLM's own loader at each
               update; the hash covers the copy, the loader's result is upstream's
SliceTarget    one rank of a parallel engine: the rows of which it holds any part; its slices
               are written through the loader's map and compared with the copy, bit for bit
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from harvester.contracts.errors import Corrupt, Unsupported
from weightsync.elements.bits import TORCH_DTYPES, Bits, Layout, TensorSpec, bits_of
from weightsync.layout.slices import SliceRecord
from weightsync.receive.held_parts import whole_box
from weightsync.receive.target import HostTarget
from weightsync.vllm.layers import unwrapped
from weightsync.vllm.loader_map import Segment, check_twins, recorded, storages_of
from weightsync.vllm.rank_parts import held_elsewhere

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HostCopy(HostTarget):
    """An ApplyTarget but for `finish`, in which a subclass passes the copy on to its engine."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._tensors = {
            name: torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
            for name, spec in layout.items()
        }

    def bits(self, name: str) -> Bits:
        return bits_of(self._tensors[name])


class ShadowTarget(HostCopy):
    """An ApplyTarget over host memory, whose changed tensors are loaded at each update, or all if a
    layer derives a form from its weights. `after` is called once the loader is done.

    `loading`: entered around each load; given where layers must be loaded whole to be processed.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        after: Callable[[], object],
        loading: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        super().__init__(layout)
        self._model = model
        self._after = after
        self._loading = loading

    def finish(self, changed: Collection[str]) -> None:
        if self._loading is None:
            self._load(changed)
        else:
            with self._loading():
                self._load(self._tensors)
        self._after()

    def _load(self, names: Collection[str]) -> None:
        with unwrapped(self._model):
            self._model.load_weights((name, self._tensors[name]) for name in sorted(names))


@dataclass(frozen=True, slots=True)
class HeldRows:
    """A selection of rows of each tensor; a run of rows is contiguous."""

    rows: Mapping[str, range]

    def box(self, name: str, spec: TensorSpec) -> SliceRecord | None:
        rows = self.rows.get(name)
        if rows is None or not spec.shape or rows == range(spec.shape[0]):
            return None if rows is None else whole_box(name, spec)
        rest = spec.shape[1:]
        return SliceRecord(name, spec.shape, (rows.start, *(0 for _ in rest)), (len(rows), *rest))


class SliceTarget(HostCopy):
    """An ApplyTarget over host memory and one rank's runtime storage.

    `layout` and `segments` are of the whole checkpoint; its own layout is that of the held rows.
    `after` is called with the touched storages. `passed_over`: names that no rank has a place for.
    """

    def __init__(
        self,
        layout: Layout,
        segments: Mapping[str, list[Segment]],
        after: Callable[[Collection[int]], object],
        passed_over: Collection[str] = (),
    ) -> None:
        self.selection = HeldRows(_held_rows(layout, segments, passed_over))
        """The part that a receiver must bring."""
        boxes = {name: self.selection.box(name, spec) for name, spec in layout.items()}
        super().__init__(
            {
                name: TensorSpec(layout[name].dtype, box.lengths)
                for name, box in boxes.items()
                if box is not None
            }
        )
        self._segments = {
            name: [_within(segment, layout[name], self.selection.rows[name]) for segment in parts]
            for name, parts in segments.items()
        }
        self._after = after
        self._passed_over = sorted(passed_over)

    def finish(self, changed: Collection[str]) -> None:
        """Write the slices. Raises Corrupt if a slice differs from the host copy afterwards."""
        check_twins(self._passed_over, self._layout, self.bits)
        touched = set()
        for name in changed:
            for segment in self._segments.get(name, ()):
                segment.destination.copy_(segment.of(self._tensors[name]))
                touched.add(segment.storage)
        self._after(touched)
        for name, segments in self._segments.items():
            if not all(is_held(segment, self._tensors[name]) for segment in segments):
                raise Corrupt(f"{name}: what this rank holds of it is not what was written")

    def is_current(self, model: torch.nn.Module, aside: Collection[int] = ()) -> bool:
        """See LoaderMap."""
        held = storages_of(model).union(aside)
        return all(
            segment.storage in held for parts in self._segments.values() for segment in parts
        )


def _held_rows(
    layout: Layout, segments: Mapping[str, list[Segment]], passed_over: Collection[str]
) -> dict[str, range]:
    """For every tensor of which the rank has a piece, the rows from its first to its last element.

    Tensors that no rank has a place for are compared with whole tensors, so those are held whole.
    """
    compared = {layout[name] for name in passed_over}
    rows = {name: _all_rows(layout[name]) for name in passed_over}
    for name, parts in segments.items():
        spec = layout[name]
        if spec in compared or spec.elements == 0:
            rows[name] = _all_rows(spec)
            continue
        width = prod(spec.shape[1:])
        ends = [
            (
                part.offset,
                part.offset + sum((n - 1) * s for n, s in _extents(part)),
            )
            for part in parts
            if prod(part.shape)
        ]
        if ends:
            first, last = min(start for start, _ in ends), max(end for _, end in ends)
            rows[name] = range(first // width, last // width + 1)
        else:
            rows[name] = _all_rows(spec)
    return rows


def _extents(segment: Segment) -> Iterator[tuple[int, int]]:
    return zip(segment.shape, segment.strides, strict=True)


def _all_rows(spec: TensorSpec) -> range:
    return range(spec.shape[0] if spec.shape else 1)


def _within(segment: Segment, spec: TensorSpec, rows: range) -> Segment:
    """The same piece, with its offset relative to the first held row."""
    return replace(segment, offset=segment.offset - rows.start * prod(spec.shape[1:]))


def is_held(segment: Segment, checkpoint: torch.Tensor) -> bool:
    """Whether runtime storage has the piece of a checkpoint tensor, bit for bit."""
    held = segment.destination
    wanted = segment.of(checkpoint).to(device=held.device, dtype=held.dtype)
    integers = _INTEGERS[held.dtype.itemsize]
    return torch.equal(held.contiguous().view(integers), wanted.contiguous().view(integers))


def traced_slices(
    model: Any,
    layout: Layout,
    after: Callable[[Collection[int]], object],
    loading: AbstractContextManager[object] | None = None,
) -> SliceTarget:
    """Run a rank's loader once and verify that it copies without conversion.

    A tensor that it does not copy must be on another rank, or equal another tensor (a tied output
    head). Raises as `traced` does.
    """
    loaded, segments = recorded(model, layout, loading)
    for name, parts in segments.items():
        if not all(is_held(segment, loaded[name]) for segment in parts):
            raise Unsupported(f"the loader does not copy {name} as it is")
    missing = layout.keys() - segments.keys()
    missing -= held_elsewhere(model, missing)
    if any(len(layout[name].shape) < 2 for name in missing):
        raise Unsupported(f"the loader does not copy {min(missing)} as it is")
    return SliceTarget(layout, segments, after, missing)
