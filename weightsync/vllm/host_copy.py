"""A checkpoint in host memory, for engines whose own storage cannot be read back whole."""

import torch

from weightsync.elements.bits import TORCH_DTYPES, Bits, Layout, bits_of
from weightsync.target import HostTarget


class HostCopy(HostTarget):
    """An ApplyTarget but for `finish`, in which a subclass passes the copy on to its engine."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
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
