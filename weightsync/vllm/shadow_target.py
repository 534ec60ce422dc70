"""The way for models whose loader cannot be mapped: a full copy, loaded by vLLM's own loader.

Costs one copy of the checkpoint in host memory and a load of every changed tensor per update. What
is hashed is this copy; what the loader makes of it is upstream's.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch

from weightsync.bits import TORCH_DTYPES, Bits, Layout, bits_of


class ShadowTarget:
    """An ApplyTarget over host memory. `after` is called once the loader is done."""

    def __init__(self, model: Any, layout: Layout, after: Callable[[], object]) -> None:
        self._model = model
        self._layout = layout
        self._after = after
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
        self._model.load_weights((name, self._tensors[name]) for name in sorted(changed))
        self._after()
