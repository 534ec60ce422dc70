"""Target of an apply: named tensors whose bits are read and written in checkpoint layout.

A target never checks hashes and never decides what to write; receiver.py does.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from harvester.contracts.errors import ConfigError
from weightsync.elements.bits import (
    Bits,
    Layout,
    Tensor,
    bits_of,
    is_contiguous,
    memory_of,
    spec_of,
)
from weightsync.encoding.delta import Delta, apply_all


class ApplyTarget(Protocol):
    def layout(self) -> Layout:
        """Names and specs of every tensor, in checkpoint layout."""

    def bits(self, name: str) -> Bits:
        """The tensor's current bits: its own memory if contiguous, else a copy."""

    def commit(self, name: str, bits: Bits) -> None:
        """Store bits that `bits(name)` returned and that were changed since."""

    def change(self, name: str, deltas: Sequence[Delta]) -> None:
        """Apply deltas to a tensor, in order."""

    def finish(self, changed: Collection[str]) -> None:
        """Called once after every changed tensor is committed."""


class HostTarget:
    """Changes tensors through their bits in host memory, by default the tensors' own memory."""

    _layout: Layout

    def layout(self) -> Layout:
        return self._layout

    def commit(self, name: str, bits: Bits) -> None:
        """No-op: `bits` is the tensor's own memory already."""

    def finish(self, changed: Collection[str]) -> None:
        """No-op: nothing is derived from these tensors."""

    def change(self: ApplyTarget, name: str, deltas: Sequence[Delta]) -> None:
        bits = self.bits(name)
        apply_all(deltas, bits)
        self.commit(name, bits)


class TensorTarget(HostTarget):
    """CPU tensors or numpy arrays by checkpoint name, changed in place. Several names of one
    memory, such as tied weights, are changed once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ConfigError for tensors that cannot be changed in place, and Unsupported for
        those that safetensors cannot name."""
        for name, tensor in tensors.items():
            if not is_contiguous(tensor):
                raise ConfigError(f"{name} is not contiguous: it cannot be changed in place")
            if isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
                raise ConfigError(f"{name} is a read-only array: it cannot be changed in place")
        self._layout = {name: spec_of(tensor, what=name) for name, tensor in tensors.items()}
        self._bits = {name: bits_of(tensor) for name, tensor in tensors.items()}
        owners: dict[object, str] = {}
        self._owner = {
            name: owners.setdefault(memory_of(tensor) or name, name)
            for name, tensor in tensors.items()
        }

    def bits(self, name: str) -> Bits:
        return self._bits[name]

    def change(self, name: str, deltas: Sequence[Delta]) -> None:
        if self._owner[name] == name:
            super().change(name, deltas)
