"""Target for models whose loader cannot be mapped: a full copy, loaded by vLLM's own loader.

Costs one copy of the checkpoint in host memory and a load of every changed tensor per update, or of
all tensors if a layer derives a form from its weights. The hash covers this copy; the loader's
result is upstream's responsibility.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from weightsync.elements.bits import Layout
from weightsync.vllm.host_copy import HostCopy
from weightsync.vllm.layers import unwrapped


class ShadowTarget(HostCopy):
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
