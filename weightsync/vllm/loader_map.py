"""Maps a checkpoint's elements to a running engine's storage, learned from the model's own loader.

Each copy that the loader was seen to make shows as (checkpoint tensor, offset, shape, strides) to a
view of runtime storage. The map is used only if it reads back exactly the loaded values, for every
tensor; so a loader that converts, computes or aliases is detected. One rank of several: see
rank_map.py.

A tensor that the loader skips is accepted only if another tensor holds the same bits, as the output
head of a model with tied embeddings does: it is kept beside the engine's weights, and every state
in which the two differ is refused.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from harvester.contracts.errors import ConfigError, Corrupt, Unsupported
from weightsync.elements.bits import (
    Bits,
    Layout,
    bits_of,
    tensor_from_bits,
    zero_tensor,
)
from weightsync.elements.device_hash import digests_on_device, is_proven
from weightsync.encoding.codec import Encoding
from weightsync.encoding.delta import Delta
from weightsync.receive.target import HostTarget
from weightsync.vllm.device_delta import ON_HOST_ONLY, apply_on_device
from weightsync.vllm.layers import storages_of
from weightsync.vllm.loader_trace import LoaderCopy, drawn, recorded

HOST = "cpu"


class LoaderMap(HostTarget):
    """An ApplyTarget over runtime storage. `after` is called with the touched storages.

    `passed_over`: tensors that the loader skips, kept beside the engine's weights. `copies`:
    tensors that are kept in host memory and passed on, because runtime storage has another form of
    them.
    """

    def __init__(
        self,
        layout: Layout,
        segments: Mapping[str, list[LoaderCopy]],
        after: Callable[[Collection[int]], object],
        passed_over: Collection[str] = (),
        copies: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._layout = layout
        self._segments = segments
        self._after = after
        self._passed_over = sorted(passed_over)
        self._copies = copies or {}
        whole = {
            name: parts[0].destination
            for name, parts in segments.items()
            if name not in self._copies and len(parts) == 1 and parts[0].is_whole(layout[name])
        }
        self._on_device = {name: held for name, held in whole.items() if held.device.type != HOST}
        self.hashed_there = frozenset(
            name for name, held in self._on_device.items() if is_proven(held.device)
        )
        """Tensors that `digests_there` hashes: their devices hash as the library does."""
        self._flat = {
            name: bits_of(held) for name, held in whole.items() if name not in self._on_device
        }

    def bits(self, name: str) -> Bits:
        if name in self._flat:
            return self._flat[name]
        if name in self._copies:
            return bits_of(self._copies[name])
        spec = self._layout[name]
        gathered = zero_tensor(spec)
        for segment in self._segments[name]:
            segment.of(gathered).copy_(segment.destination)
        return bits_of(gathered)

    def commit(self, name: str, bits: Bits) -> None:
        if name in self._flat or name in self._copies:
            return
        changed = tensor_from_bits(bits, self._layout[name])
        for segment in self._segments[name]:
            segment.destination.copy_(segment.of(changed))

    def change(self, name: str, deltas: Sequence[Delta]) -> None:
        held = self._on_device.get(name)
        if held is None:
            super().change(name, deltas)
            return
        for delta in deltas:
            apply_on_device(delta, held)

    def check_deltas(self, encodings: Collection[Encoding | None]) -> None:
        """Raises Unsupported for deltas that need the tensors in host memory."""
        if self._on_device and Encoding.CONTEXT in encodings:
            raise Unsupported(ON_HOST_ONLY)

    def digests_there(self) -> dict[str, str]:
        """Digests of `hashed_there`, computed on the tensors' devices."""
        by_device: dict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)
        for name in self.hashed_there:
            held = self._on_device[name]
            by_device[held.device][name] = held
        found: dict[str, str] = {}
        for tensors in by_device.values():
            found |= digests_on_device(tensors)
        return found

    def finish(self, changed: Collection[str]) -> None:
        """Raises ConfigError if a tensor without a place equals no other one, and Corrupt if
        runtime storage differs from a host copy."""
        self._check_twins()
        for name in self._copies.keys() & set(changed):
            for segment in self._segments[name]:
                segment.destination.copy_(segment.of(self._copies[name]))
        self._after(self._storages(changed))
        for name, copy in self._copies.items():
            if not all(is_held(segment, copy) for segment in self._segments[name]):
                raise Corrupt(f"{name}: the held part does not match the bits that were written")

    def names_by_storage(self) -> dict[int, list[str]]:
        """The tensors of each storage that holds a part of them."""
        found: dict[int, list[str]] = defaultdict(list)
        for name, segments in self._segments.items():
            for storage in sorted({segment.storage for segment in segments}):
                found[storage].append(name)
        return dict(found)

    def flat_at(self, name: str) -> int | None:
        """Element offset, in its storage, of a contiguous tensor; None if it is not contiguous."""
        if name not in self._flat:
            return None
        return int(self._segments[name][0].destination.storage_offset())

    def is_current(self, model: torch.nn.Module, aside: Collection[int] = ()) -> bool:
        """Whether the model still uses this storage: a map of old storage would hash to the right
        state while the engine computes from other storage.

        `aside`: storages that belong to the engine without being the model's.
        """
        names = self._segments.keys() - set(self._passed_over)
        return self._storages(names) <= storages_of(model).union(aside)

    def _storages(self, names: Iterable[str]) -> set[int]:
        return {segment.storage for name in names for segment in self._segments[name]}

    def _check_twins(self) -> None:
        for name in self._passed_over:
            bits = self.bits(name)
            twins = twins_of(name, self._layout, self._passed_over)
            if not any(np.array_equal(bits, self.bits(other)) for other in twins):
                raise no_place(name)


def traced(
    model: Any,
    layout: Layout,
    after: Callable[[Collection[int]], object],
    loading: AbstractContextManager[object] | None = None,
    *,
    is_dummy: bool = False,
) -> LoaderMap:
    """Run the model's loader and verify the map.

    `loading` is entered for the run. Raises Unsupported if the map does not hold, and ConfigError
    if the loader refuses the checkpoint, or the checkpoint lacks a weight of the model. `model` has
    vLLM's `load_weights`. `is_dummy`: its buffers are random too.
    """
    segments = recorded(model, layout, loading, is_dummy=is_dummy)
    passed_over = sorted(layout.keys() - segments.keys())
    for name in passed_over:
        segments[name] = [_beside(layout, name)]
    found = LoaderMap(layout, segments, after, passed_over)
    for name in sorted(layout.keys() - set(passed_over)):
        if not np.array_equal(found.bits(name), bits_of(drawn(name, layout[name]))):
            raise Unsupported(f"the loader does not copy {name} as it is")
    return found


def is_held(segment: LoaderCopy, checkpoint: torch.Tensor) -> bool:
    """Whether runtime storage has the piece of a checkpoint tensor, bit for bit."""
    held = segment.destination
    expected = segment.of(checkpoint).to(device=held.device, dtype=held.dtype)
    parts = (part.contiguous().view(-1).view(torch.uint8) for part in (held, expected))
    return torch.equal(*parts)


def twins_of(name: str, layout: Layout, passed_over: Collection[str]) -> Iterator[str]:
    """The tensors that one without a place may equal."""
    return (other for other in layout if layout[other] == layout[name] and other not in passed_over)


def no_place(name: str) -> ConfigError:
    return ConfigError(
        f"this engine has no place for {name}, and no other tensor of the checkpoint is equal to "
        "it: is the engine's model tied where the trainer's is not?"
    )


def _beside(layout: Layout, name: str) -> LoaderCopy:
    """Separate memory for a matrix that may equal another one; raises Unsupported for any other
    shape: vectors of ones equal others by chance."""
    spec = layout[name]
    if len(spec.shape) < 2 or sum(other == spec for other in layout.values()) < 2:
        raise Unsupported(f"the loader does not copy {name} as it is")
    kept = zero_tensor(spec)
    return LoaderCopy(tuple(kept.shape), kept.stride(), 0, kept)
