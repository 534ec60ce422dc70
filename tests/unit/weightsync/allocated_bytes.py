"""Memory that torch's operations allocate, counted on any device."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocatedBytes(TorchDispatchMode):
    """Inside, `most` is the largest sum of storages that operations made and that were held.

    Memory that one operation holds only while it runs is not seen.
    """

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.most = 0
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        inputs = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        self._held = {at: held for at, held in self._held.items() if not held[0].expired()}
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in inputs | self._given:
                self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(size for _, size in self._held.values()))
        return out
