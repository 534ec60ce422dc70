"""Where a checkpoint's elements lie in a running engine, learned from the model's own loader.

The loader is run once on random tensors while every copy is recorded: each shows as (checkpoint
tensor, offset, shape, strides) to a view of runtime storage. The map is believed only if it reads
back exactly what was loaded, for every tensor; so a loader that converts, computes or aliases is
found at once. Tracing leaves random weights behind: apply a full checkpoint next.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harvester.contracts.errors import ConfigError, Unsupported
from weightsync.bits import TORCH_DTYPES, Bits, Layout, TensorSpec, bits_of

_SEED = 20240607


@dataclass(frozen=True, slots=True)
class Segment:
    """One copy of the loader: a strided piece of a checkpoint tensor, and where it lands."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    destination: torch.Tensor

    def of(self, checkpoint: torch.Tensor) -> torch.Tensor:
        """The piece of a contiguous checkpoint tensor."""
        return checkpoint.as_strided(self.shape, self.strides, self.offset)

    def is_whole(self, spec: TensorSpec) -> bool:
        """Whether it is the whole tensor, flat on both sides and bit for bit."""
        return (
            self.offset == 0
            and self.destination.numel() == spec.elements
            and torch.empty(self.shape, device="meta").stride() == self.strides
            and self.destination.is_contiguous()
            and self.destination.dtype == TORCH_DTYPES[spec.dtype]
            and self.destination.device.type == "cpu"
        )


class LoaderMap:
    """An ApplyTarget over runtime storage. `after` is called with the touched storages."""

    def __init__(
        self,
        layout: Layout,
        segments: dict[str, list[Segment]],
        after: Callable[[Collection[int]], object],
    ) -> None:
        self._layout = layout
        self._segments = segments
        self._after = after

    def layout(self) -> Layout:
        return self._layout

    def bits(self, name: str) -> Bits:
        spec = self._layout[name]
        segments = self._segments[name]
        if len(segments) == 1 and segments[0].is_whole(spec):
            return bits_of(segments[0].destination)
        gathered = torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        for segment in segments:
            segment.of(gathered).copy_(segment.destination)
        return bits_of(gathered)

    def commit(self, name: str, bits: Bits) -> None:
        spec = self._layout[name]
        segments = self._segments[name]
        if len(segments) == 1 and segments[0].is_whole(spec):
            return
        changed = torch.from_numpy(bits).view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
        for segment in segments:
            segment.destination.copy_(segment.of(changed))

    def finish(self, changed: Collection[str]) -> None:
        self._after(self._storages(changed))

    def is_current(self, model: torch.nn.Module) -> bool:
        """False once the model holds its weights elsewhere: a map of old storage would still hash
        to the right state while the engine computes from another."""
        held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        return self._storages(self._segments) <= held

    def _storages(self, names: Iterable[str]) -> set[int]:
        return {
            segment.destination.untyped_storage().data_ptr()
            for name in names
            for segment in self._segments[name]
        }


def traced(model: Any, layout: Layout, after: Callable[[Collection[int]], object]) -> LoaderMap:
    """Runs the model's loader once and proves the map.

    Raises Unsupported where the map does not hold, and ConfigError where the loader refuses the
    checkpoint. `model` has vLLM's `load_weights`.
    """
    generator = torch.Generator().manual_seed(_SEED)
    loaded = {name: _random(spec, generator) for name, spec in layout.items()}
    names = {tensor.untyped_storage().data_ptr(): name for name, tensor in loaded.items()}
    segments: dict[str, list[Segment]] = defaultdict(list)

    def record(destination: torch.Tensor, source: torch.Tensor) -> None:
        name = names.get(source.untyped_storage().data_ptr())
        if name is not None and source.shape == destination.shape:
            segment = Segment(
                tuple(source.shape),
                source.stride(),
                int(source.storage_offset()),
                destination.detach(),
            )
            segments[name].append(segment)

    with _recorded_copies(record):
        try:
            model.load_weights(iter(loaded.items()))
        except Exception as error:
            raise ConfigError(f"the store's checkpoint does not fit this model: {error}") from error
    found = LoaderMap(layout, dict(segments), after)
    for name, tensor in loaded.items():
        if name not in segments or not np.array_equal(found.bits(name), bits_of(tensor)):
            raise Unsupported(f"the loader does not copy {name} as it is")
    return found


@contextmanager
def _recorded_copies(record: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    plain = torch.Tensor.copy_

    def copy(self: torch.Tensor, src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        record(self, src)
        return plain(self, src, *args, **kwargs)

    torch.Tensor.copy_ = copy  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        # `copy_` belongs to the base class of torch.Tensor: uncover it again.
        del torch.Tensor.copy_


def _random(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    dtype = TORCH_DTYPES[spec.dtype]
    if dtype.is_floating_point:
        return torch.randn(spec.shape, generator=generator).to(dtype)
    return torch.randint(0, 2, spec.shape, generator=generator).to(dtype)
