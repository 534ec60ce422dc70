"""The way for models whose loader cannot be mapped: a full copy, loaded by vLLM's own loader.

Costs one copy of the checkpoint in host memory and a load of every changed tensor per update, or of
all tensors where a layer derives something from its weights. What is hashed is this copy; what the
loader makes of it is upstream's.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch

from weightsync.bits import TORCH_DTYPES, Bits, Layout, bits_of
from weightsync.target import HostTarget


class ShadowTarget(HostTarget):
    """An ApplyTarget over host memory. `after` is called once the loader is done.

    `loading`: entered around each load; given where layers must be loaded whole to be processed.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        after: Callable[[], object],
        loading: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._model = model
        self._layout = layout
        self._after = after
        self._loading = loading
        self._tensors = {
            name: torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
            for name, spec in layout.items()
        }

    def layout(self) -> Layout:
        return self._layout

    def bits(self, name: str) -> Bits:
        return bits_of(self._tensors[name])

    def commit(self, name: str, bits: Bits) -> None:
        """`bits` is the copy's own memory already."""

    def finish(self, changed: Collection[str]) -> None:
        if self._loading is None:
            self._load(changed)
        else:
            with self._loading():
                self._load(self._tensors)
        self._after()

    def _load(self, names: Collection[str]) -> None:
        self._model.load_weights((name, self._tensors[name]) for name in sorted(names))
