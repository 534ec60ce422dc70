"""Maps the boxes of a checkpoint that one rank of several holds to its runtime storage.

Learned once, as in loader_map.py. Row blocks, column blocks and parts of fused layers lie in one
piece in runtime storage: each such box is a tensor of the rank, that deltas change where it lies.
If any box of a tensor has another dtype or order there, the rank keeps the rows of that tensor that
it has a part of in host memory, and logs a warning.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch

from harvester.contracts.errors import Unsupported
from weightsync.elements.bits import Layout, TensorSpec, torch_dtypes, zero_tensor
from weightsync.layout.slices import SliceRecord, Slicing, whole_box
from weightsync.receive.held_parts import (
    HeldParts,
    element_strides,
    held_name,
    held_parts,
)
from weightsync.vllm.loader_map import LoaderMap, is_held, no_place, twins_of
from weightsync.vllm.loader_trace import LoaderCopy, drawn, recorded
from weightsync.vllm.rank_parts import held_elsewhere

_logger = logging.getLogger("vllm.rosemux.weightsync")


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """A selection of boxes, by tensor."""

    by_tensor: Mapping[str, Sequence[SliceRecord]]

    def boxes(self, name: str, spec: TensorSpec) -> Sequence[SliceRecord]:  # noqa: ARG002
        return self.by_tensor.get(name, ())


class RankMap(LoaderMap):
    """A LoaderMap whose tensors are boxes of the checkpoint's.

    `selection`: the boxes, which a receiver must bring. `unplaced`: tensors of the checkpoint that
    no rank has a place for.
    """

    def __init__(
        self,
        selection: HeldBoxes,
        layout: Layout,
        segments: Mapping[str, list[LoaderCopy]],
        after: Callable[[Collection[int]], object],
        *,
        copies: Mapping[str, torch.Tensor],
        unplaced: Collection[str],
    ) -> None:
        super().__init__(layout, segments, after, copies=copies)
        self.selection = selection
        self._unplaced = sorted(unplaced)

    def check_unplaced(self, parts: HeldParts, table: Mapping[str, str]) -> None:
        """Raises ConfigError if a tensor without a place equals no other one. `table`: digests of
        all entries."""
        slices = parts.slicing.by_tensor()

        def digests(name: str) -> list[tuple[object, ...]]:
            records = slices.get(name, [(name, whole_box(name, parts.whole[name]))])
            return sorted(
                (record.offsets, record.lengths, table[entry]) for entry, record in records
            )

        for name in self._unplaced:
            twins = twins_of(name, parts.whole, self._unplaced)
            if not any(digests(name) == digests(other) for other in twins):
                raise no_place(name)


def traced_rank(
    model: Any,
    layout: Layout,
    after: Callable[[Collection[int]], object],
    loading: AbstractContextManager[object] | None = None,
    *,
    is_dummy: bool = False,
) -> RankMap:
    """Run a rank's loader and verify that it copies without computing.

    A tensor that it does not copy must be on another rank, or equal another tensor (a tied output
    head). Raises as `traced` does.
    """
    recorded_segments = recorded(model, layout, loading, is_dummy=is_dummy)
    for name, parts in recorded_segments.items():
        loaded = drawn(name, layout[name])
        if not all(is_held(segment, loaded) for segment in parts):
            raise Unsupported(f"the loader does not copy {name} as it is")
    missing = layout.keys() - recorded_segments.keys()
    missing -= held_elsewhere(model, missing)
    if any(len(layout[name].shape) < 2 for name in missing):
        raise Unsupported(f"the loader does not copy {min(missing)} as it is")
    boxes: dict[str, list[SliceRecord]] = {}
    segments: dict[str, list[LoaderCopy]] = {}
    copies: dict[str, torch.Tensor] = {}
    for name, parts in recorded_segments.items():
        spec = layout[name]
        filled = [part for part in parts if prod(part.shape) or not spec.elements]
        if not filled:
            continue
        places = _boxes(name, spec, filled)
        if places is None:
            box = _rows(name, spec, filled)
            boxes[name], segments[name] = [box], [_within(part, box) for part in filled]
            copies[name] = zero_tensor(replace(spec, shape=box.lengths))
            continue
        boxes[name] = [box for box, _ in places]
        for box, held in places:
            piece = held.view(box.lengths)
            strides = tuple(element_strides(box.lengths))
            segments[held_name(box, boxes[name])] = [LoaderCopy(box.lengths, strides, 0, piece)]
    if copies:
        _logger.warning(
            "%s and %d other tensors (%d bytes) stay in host memory too: this rank computes from "
            "another form of them",
            min(copies),
            len(copies) - 1,
            sum(copy.nbytes for copy in copies.values()),
        )
    selection = HeldBoxes(boxes)
    held_layout = held_parts(layout, Slicing(), selection).layout()
    return RankMap(selection, held_layout, segments, after, copies=copies, unplaced=missing)


def _boxes(
    name: str, spec: TensorSpec, parts: Sequence[LoaderCopy]
) -> list[tuple[SliceRecord, torch.Tensor]] | None:
    """The boxes of the copies, with their places; None if a box is not stored unchanged in its
    place, or places overlap."""
    found: dict[tuple[int, int], tuple[SliceRecord, torch.Tensor]] = {}
    for part in parts:
        place, box = part.destination, _box_of(name, spec, part)
        if box is None or not place.is_contiguous() or place.dtype != torch_dtypes()[spec.dtype]:
            return None
        # A copy that a loader repeats counts once.
        found[place.data_ptr(), place.nbytes] = (box, place)
    ends = sorted((start, start + size) for start, size in found)
    if any(end > start for (_, end), (start, _) in pairwise(ends)):
        return None
    boxes = list(found.values())
    return boxes if len({box.entry for box, _ in boxes}) == len(boxes) else None


def _box_of(name: str, spec: TensorSpec, part: LoaderCopy) -> SliceRecord | None:
    """The box of a tensor with the elements of a copy in their order; None without one."""
    if not spec.shape or not spec.elements:
        return whole_box(name, spec)
    first, last = (np.unravel_index(at, spec.shape) for at in (part.offset, part.last))
    lengths = [int(b) - int(a) + 1 for a, b in zip(first, last, strict=True)]
    strides = element_strides(spec.shape)
    if min(lengths) < 1 or _steps(lengths, strides) != _steps(part.shape, part.strides):
        return None
    return SliceRecord(name, spec.shape, tuple(map(int, first)), tuple(lengths))


def _steps(lengths: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Lengths and strides of a view, with dimensions that continue each other as one."""
    steps: list[tuple[int, int]] = []
    for length, stride in zip(lengths, strides, strict=True):
        if length == 1:
            continue
        if steps and steps[-1][1] == length * stride:
            steps[-1] = (steps[-1][0] * length, stride)
        else:
            steps.append((length, stride))
    return steps


def _rows(name: str, spec: TensorSpec, parts: Sequence[LoaderCopy]) -> SliceRecord:
    """The rows of a tensor from the first to the last element of its copies."""
    if not spec.shape or not spec.elements:
        return whole_box(name, spec)
    rest = spec.shape[1:]
    width = prod(rest)
    first = min(part.offset for part in parts) // width
    count = max(part.last for part in parts) // width - first + 1
    return SliceRecord(name, spec.shape, (first, *(0 for _ in rest)), (count, *rest))


def _within(part: LoaderCopy, rows: SliceRecord) -> LoaderCopy:
    """The same piece, with its offset relative to the first held row."""
    return replace(part, offset=part.offset - sum(rows.offsets[:1]) * prod(rows.shape[1:]))
