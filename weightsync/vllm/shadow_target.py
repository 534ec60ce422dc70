"""A full copy of a checkpoint in host memory, for engines whose loader has no map (`loader_map`).

vLLM's own loader passes the copy on at each update. The hash covers the copy; the loader's result
is upstream's.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from weightsync.elements.bits import Bits, Layout, bits_of, zero_tensor
from weightsync.receive.target import HostTarget
from weightsync.vllm.layers import unwrapped


class ShadowTarget(HostTarget):
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
        self._layout = layout
        self._tensors = {name: zero_tensor(spec) for name, spec in layout.items()}
        self._model = model
        self._after = after
        self._loading = loading

    def bits(self, name: str) -> Bits:
        return bits_of(self._tensors[name])

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
