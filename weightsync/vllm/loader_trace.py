"""Runs a model's loader on random tensors and records every copy that it makes.

A tensor is drawn when the loader asks for it, and again to be compared, so that no more than the
loader keeps exists at a time. Before that the loader is run with its copies held back, so that a
checkpoint that does not fit, or lacks a weight, is refused with nothing written. A run leaves
random weights behind: apply a full checkpoint next.
"""

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harvester.contracts.errors import ConfigError
from weightsync.elements.bits import (
    UNSIGNED_NUMPY,
    Bytes,
    Layout,
    TensorSpec,
    torch_dtypes,
)
from weightsync.vllm.layers import plain_weights, unwrapped

_logger = logging.getLogger("vllm.rosemux.weightsync")

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
