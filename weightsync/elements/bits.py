"""Tensors as raw bits, the input of every codec and hash.

Decides the name of a dtype on disk and the unsigned integer that carries its bits. Never converts a
value: NaN payloads and signed zeros pass through untouched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from harvester.contracts.errors import Corrupt, Unsupported

Bits: TypeAlias = npt.NDArray[np.unsignedinteger]
"""A flat, C-contiguous array of uint8, uint16, uint32 or uint64: one element per tensor element."""
Bytes: TypeAlias = npt.NDArray[np.uint8]

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""safetensors dtype names and their torch dtypes."""
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_UNSIGNED_TORCH = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
UNSIGNED_NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

BLOCK_BYTES = 256 << 10
"""Bytes that a loop changes and hashes at a time: two blocks fit into a core's own cache."""
MAX_DIMS = 8
MAX_TENSOR_BYTES = 1 << 40


@dataclass(frozen=True)
class TensorSpec:
    """dtype (safetensors name) and shape of one checkpoint tensor.

    Without slots, so that its properties are cached: they are read several times per tensor and
    version.
    """

    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def width_bytes(self) -> int:
        return TORCH_DTYPES[self.dtype].itemsize

    @cached_property
    def elements(self) -> int:
        return prod(self.shape)

    @cached_property
    def size_bytes(self) -> int:
        return self.elements * self.width_bytes


Layout: TypeAlias = Mapping[str, TensorSpec]
"""Names and specs of all tensors of one checkpoint."""


@lru_cache(maxsize=1 << 12)
def shared_spec(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """One object for all tensors of a kind: quick to compare, and a model has few kinds."""
    return TensorSpec(dtype, shape)


def checked_spec(dtype: str, shape: tuple[int, ...], *, what: str) -> TensorSpec:
    """Check a spec that was read from outside; raises Unsupported or Corrupt naming `what`."""
    if dtype not in TORCH_DTYPES:
        raise Unsupported(f"{what}: dtype {dtype!r} is not one of {', '.join(TORCH_DTYPES)}")
    if len(shape) > MAX_DIMS or any(dim < 0 for dim in shape):
        raise Corrupt(f"{what}: impossible shape {shape}")
    spec = shared_spec(dtype, shape)
    if spec.size_bytes > MAX_TENSOR_BYTES:
        raise Corrupt(f"{what}: {spec.size_bytes} bytes is over the limit of {MAX_TENSOR_BYTES}")
    return spec


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a live tensor; raises Unsupported for dtypes without a safetensors name."""
    if tensor.dtype not in _NAMES:
        raise Unsupported(
            f"dtype {tensor.dtype} cannot be published; cast to one of {', '.join(TORCH_DTYPES)}"
        )
    return shared_spec(_NAMES[tensor.dtype], tuple(tensor.shape))


def bits_of(tensor: torch.Tensor) -> Bits:
    """The bits of a contiguous CPU tensor, sharing its memory."""
    if tensor.device.type != "cpu":
        raise Unsupported(f"tensor on {tensor.device}: copy it to the CPU first (`tensor.cpu()`)")
    if not tensor.is_contiguous():
        raise Unsupported("tensor is not contiguous: call `.contiguous()` first")
    unsigned = _UNSIGNED_TORCH[tensor.dtype.itemsize]
    bits: Bits = tensor.detach().reshape(-1).view(unsigned).numpy()
    return bits


def bits_from_bytes(data: Bytes, spec: TensorSpec) -> Bits:
    """Raw little-endian bytes as the bits of a tensor, in the same memory; raises Corrupt."""
    if data.size != spec.size_bytes:
        raise Corrupt(
            f"{data.size} bytes where {spec.dtype}{list(spec.shape)} needs {spec.size_bytes}"
        )
    return data.view(UNSIGNED_NUMPY[spec.width_bytes])


def bytes_of(bits: Bits) -> Bytes:
    """The bits as bytes, sharing memory."""
    return bits.view(np.uint8)


def tensor_from_bits(bits: Bits, spec: TensorSpec) -> torch.Tensor:
    """A tensor over the same memory."""
    return torch.from_numpy(bits).view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
