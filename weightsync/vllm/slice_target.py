"""The way for one rank of a parallel engine, which holds slices of tensors or some tensors only.

A published digest says nothing about a slice, so each rank keeps a full copy of the checkpoint in
host memory: that is what deltas change and what is hashed. The rank's slices are written from it
through the loader's map, and every slice is then compared with it, bit for bit.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from harvester.contracts.errors import Corrupt, Unsupported
from weightsync.bits import Layout
from weightsync.vllm.host_copy import HostCopy
from weightsync.vllm.loader_map import Segment, check_twins, recorded, storages_of
from weightsync.vllm.rank_parts import held_elsewhere

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SliceTarget(HostCopy):
    """An ApplyTarget over host memory and one rank's runtime storage.

    `after` is called with the touched storages. `passed_over`: names that no rank has a place for.
    """

    def __init__(
        self,
        layout: Layout,
        segments: Mapping[str, list[Segment]],
        after: Callable[[Collection[int]], object],
        passed_over: Collection[str] = (),
    ) -> None:
        super().__init__(layout)
        self._segments = segments
        self._after = after
        self._passed_over = sorted(passed_over)

    def finish(self, changed: Collection[str]) -> None:
        """Raises Corrupt where a slice is not the one of the copy afterwards."""
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
    """Runs a rank's loader once and proves that it copies what it copies as it is.

    What it does not copy is on another rank by right, or equal to another tensor (a tied output
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
