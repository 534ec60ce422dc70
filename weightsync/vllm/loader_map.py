"""Maps a checkpoint's elements to a running engine's storage, learned from the model's own loader.

The loader is run once on random tensors while every copy is recorded: each shows as (checkpoint
tensor, offset, shape, strides) to a view of runtime storage. The map is used only if it reads back
exactly the loaded values, for every tensor; so a loader that converts, computes or aliases is
detected. A tensor is drawn when the loader asks for it, and again to be compared, so that no more
than the loader keeps exists at a time. Before that the loader is run with its copies held back, so
that a checkpoint that does not fit, or lacks a weight, is refused with nothing written. Tracing
leaves random weights behind: apply a full checkpoint next. One rank of several: see rank_map.py.

A tensor that the loader skips is accepted only if another tensor holds the same bits, as the output
head of a model with tied embeddings does: it is kept beside the engine's weights, and every state
in which the two differ is refused.
"""

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harvester.contracts.errors import ConfigError, Corrupt, Unsupported
from weightsync.elements.bits import (
    UNSIGNED_NUMPY,
    Bits,
    Bytes,
    Layout,
    TensorSpec,
    bits_of,
    tensor_from_bits,
    torch_dtypes,
    zero_tensor,
)
from weightsync.elements.device_hash import digests_on_device, is_proven
from weightsync.encoding.delta import Delta
from weightsync.receive.target import HostTarget
from weightsync.vllm.device_delta import apply_on_device
from weightsync.vllm.layers import plain_weights, storages_of, unwrapped

_logger = logging.getLogger("vllm.rosemux.weightsync")

HOST = "cpu"
_SEED = 20240607
_NAMED = 4
"""Number of tensors that a message names."""


@dataclass(frozen=True, slots=True)
class LoaderCopy:
    """One copy of the loader: a strided piece of a checkpoint tensor, and its destination."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    destination: torch.Tensor

    @property
    def storage(self) -> int:
        """Address of the destination's storage."""
        return self.destination.untyped_storage().data_ptr()

    @property
    def last(self) -> int:
        """Offset of the piece's last element."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def of(self, checkpoint: torch.Tensor) -> torch.Tensor:
        """The piece of a contiguous checkpoint tensor."""
        return checkpoint.as_strided(self.shape, self.strides, self.offset)

    def is_whole(self, spec: TensorSpec) -> bool:
        """Whether it is the whole tensor, contiguous on both sides and bit for bit."""
        return (
            self.offset == 0
            and self.destination.numel() == spec.elements
            and torch.empty(self.shape, device="meta").stride() == self.strides
            and self.destination.is_contiguous()
            and self.destination.dtype == torch_dtypes()[spec.dtype]
        )


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


def recorded(
    model: Any,
    layout: Layout,
    loading: AbstractContextManager[object] | None = None,
    *,
    is_dummy: bool = False,
) -> dict[str, list[LoaderCopy]]:
    """Run the model's loader on the tensors that `drawn` makes; returns the copies of each.

    Raises ConfigError as `traced` does. Layers that need `loading` cannot be loaded on trial: what
    the run has written by then stays.
    """
    segments, loaded = _recorded_run(model, layout, loading, writes=loading is not None)
    # A loader that computes is seen by the names that it returns alone.
    if loaded is not None or segments.keys() == layout.keys():
        reached = {segment.storage for parts in segments.values() for segment in parts}
        _check_filled(model, reached, loaded or (), is_dummy=is_dummy)
    if loading is None:
        segments, _ = _recorded_run(model, layout, None, writes=True)
    return segments


def _recorded_run(
    model: Any,
    layout: Layout,
    loading: AbstractContextManager[object] | None,
    *,
    writes: bool,
) -> tuple[dict[str, list[LoaderCopy]], Collection[str] | None]:
    """The copies of each tensor, and the names that the loader returned. Without `writes` the
    tensors are zeros, and no copy is made."""
    names: dict[int, str] = {}
    segments: dict[str, list[LoaderCopy]] = defaultdict(list)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in layout.items():
            memory = _drawn(name, spec) if writes else np.zeros(spec.size_bytes + 1, np.uint8)
            address = memory.ctypes.data
            names[address] = name
            # Views of the tensor keep this memory; afterwards another tensor may use the address.
            weakref.finalize(memory, names.pop, address)
            yield name, _tensor(memory, spec)

    def record(destination: torch.Tensor, source: torch.Tensor) -> None:
        # vLLM counts a layer's elements by copying to the meta device first.
        if destination.is_meta or source.is_meta:
            return
        name = names.get(source.untyped_storage().data_ptr())
        if name is not None and source.shape == destination.shape:
            segment = LoaderCopy(
                tuple(source.shape),
                source.stride(),
                int(source.storage_offset()),
                destination.detach(),
            )
            segments[name].append(segment)

    with _recorded_copies(record, writes=writes):
        try:
            with loading or nullcontext(), unwrapped(model):
                loaded = model.load_weights(tensors())
        except Exception as error:
            raise ConfigError(f"the store's checkpoint does not fit this model: {error}") from error
    return dict(segments), loaded


def _check_filled(
    model: torch.nn.Module, reached: Collection[int], loaded: Collection[str], *, is_dummy: bool
) -> None:
    """Raises ConfigError naming the weights that the checkpoint lacks. `reached`: storages that
    the loader wrote to; `loaded`: the model's names that it returned."""
    lacking: list[str] = []
    kept: list[str] = []
    with unwrapped(model):
        for name, held in plain_weights(model):
            if name in loaded or held.untyped_storage().data_ptr() in reached:
                continue
            # Scales have defaults, and a buffer may be a constant, which dummy weights overwrite.
            is_random = is_dummy and held.is_floating_point() and not name.endswith("_scale")
            is_weight = isinstance(held, torch.nn.Parameter) or is_random
            (lacking if is_weight else kept).append(name)
    if lacking:
        raise ConfigError(
            f"the store lacks weights that this engine computes from: {_named(lacking)}; publish "
            "the trainer's state_dict(), since named_parameters() leaves out buffers"
        )
    if kept:
        _logger.warning("buffers that the store lacks keep their values: %s", _named(kept))


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def drawn(name: str, spec: TensorSpec) -> torch.Tensor:
    """Random elements, finite and the same at every call."""
    return _tensor(_drawn(name, spec), spec)


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


@contextmanager
def _recorded_copies(
    record: Callable[[torch.Tensor, torch.Tensor], None], *, writes: bool
) -> Iterator[None]:
    plain = torch.Tensor.copy_

    def copy(self: torch.Tensor, src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        record(self, src)
        if writes or self.is_meta:
            return plain(self, src, *args, **kwargs)
        src.expand_as(self)  # Raises where the copy would.
        return self

    torch.Tensor.copy_ = copy  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        # `copy_` belongs to the base class of torch.Tensor: uncover it again.
        del torch.Tensor.copy_


@contextmanager
def plain_copies() -> Iterator[None]:
    """Context in which copies are not recorded: compilers do not see through the recorder."""
    recording = vars(torch.Tensor).get("copy_")
    if recording is None:
        yield
        return
    del torch.Tensor.copy_
    try:
        yield
    finally:
        torch.Tensor.copy_ = recording  # type: ignore[method-assign]


def _drawn(name: str, spec: TensorSpec) -> Bytes:
    """The memory of `drawn`, with up to seven bytes more."""
    random = np.random.Generator(np.random.SFC64([_SEED, *name.encode()]))
    dtype = torch_dtypes()[spec.dtype]
    if not (dtype.is_floating_point or dtype.is_complex):
        return (
            random.integers(0, 2, spec.elements)
            .astype(UNSIGNED_NUMPY[spec.width_bytes])
            .view(np.uint8)
        )
    words = random.integers(0, 1 << 64, -(-spec.size_bytes // 8), dtype=np.uint64, endpoint=False)
    memory = words.view(np.uint8)
    # Clears the exponent's highest bit, so that no number is infinite or NaN.
    step = spec.width_bytes // (2 if dtype.is_complex else 1)
    memory[step - 1 :: step] &= 0xBF
    return memory


def _tensor(memory: Bytes, spec: TensorSpec) -> torch.Tensor:
    """The elements at the start of the memory, which lives as long as they do."""
    whole = torch.from_numpy(memory)[: spec.size_bytes]
    return whole.view(torch_dtypes()[spec.dtype]).view(spec.shape)
