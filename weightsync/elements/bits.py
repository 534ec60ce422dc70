"""Tensors as raw bits, the input of every codec and hash.

Decides the name of a dtype on disk and the unsigned integer that carries its bits. Never converts a
value: NaN payloads and signed zeros pass through untouched. Tensors are torch's or numpy's: a
follower of files, and a trainer without torch, never import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from harvester.contracts.errors import Corrupt, Unsupported

if TYPE_CHECKING:
    import torch

Bits: TypeAlias = npt.NDArray[np.unsignedinteger]
"""A flat, C-contiguous array of uint8, uint16, uint32 or uint64: one element per tensor element."""
Bytes: TypeAlias = npt.NDArray[np.uint8]
Tensor: TypeAlias = "torch.Tensor | npt.NDArray[Any]"
"""A tensor of torch, or an array of numpy; dtypes beyond numpy's own are those of ml_dtypes."""

_NAMES_BY_WIDTH = {
    1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0", "F4"),
    2: ("I16", "U16", "F16", "BF16"),
    4: ("I32", "U32", "F32"),
    8: ("I64", "U64", "F64", "C64"),
}
WIDTHS_BY_DTYPE: Mapping[str, int] = {
    name: width for width, names in _NAMES_BY_WIDTH.items() for name in names
}
"""safetensors dtype names and the bytes of one element."""
PAIRED = "F4"
"""Two numbers lie in a byte, which counts as the element: specs have the shape that torch has."""
_TORCH_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
} | {
    f"{sign}{bits}": f"{kind}{bits}"
    for sign, kind in (("U", "uint"), ("I", "int"))
    for bits in (8, 16, 32, 64)
}
_NAMES = {torch_name: name for name, torch_name in _TORCH_NAMES.items()}
UNSIGNED_NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

TILE_BYTES = 256 << 10
"""Bytes that a loop changes and hashes at a time: two tiles fit into a core's own cache."""
MAX_DIMS = 8
MAX_TENSOR_BYTES = 1 << 40


@dataclass(frozen=True)
class TensorSpec:
    """dtype (safetensors name) and shape of one checkpoint tensor.

    Has no slots, so that its properties can be cached: they are read several times per tensor and
    version.
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @cached_property
    def width_bytes(self) -> int:
        return WIDTHS_BY_DTYPE[self.dtype]

    @cached_property
    def elements(self) -> int:
        return prod(self.shape)

    @cached_property
    def size_bytes(self) -> int:
        return self.elements * self.width_bytes


Layout: TypeAlias = Mapping[str, TensorSpec]
"""Names and specs of all tensors of one checkpoint."""
_SHOWN, _SHOWN_CHARS = 3, 64
"""Tensors that an error names, and the most of a name that it repeats."""


def difference(expected: Layout, found: Layout) -> str:
    """The first tensors that `found` lacks, has too or has in another form, for a message."""

    def described(name: str) -> str:
        spec, required = found.get(name), expected.get(name)
        form = f"is {spec}, not {required}" if required else "is extra"
        return f"{name[:_SHOWN_CHARS]} {form if spec else 'is missing'}"

    differing = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    more = [f"{len(differing) - _SHOWN} more"] if len(differing) > _SHOWN else []
    return "; ".join([*map(described, differing[:_SHOWN]), *more])


@lru_cache(maxsize=1 << 12)
def shared_spec(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """One object for all tensors of a kind: quick to compare, and a model has few kinds."""
    return TensorSpec(dtype, shape)


def checked_spec(dtype: str, shape: tuple[int, ...], *, what: str) -> TensorSpec:
    """Check a spec that was read from outside; raises Unsupported or Corrupt naming `what`."""
    if dtype not in WIDTHS_BY_DTYPE:
        raise Unsupported(f"{what}: dtype {dtype!r} is not one of {', '.join(WIDTHS_BY_DTYPE)}")
    if len(shape) > MAX_DIMS or any(dim < 0 for dim in shape):
        raise Corrupt(f"{what}: impossible shape {shape}")
    spec = shared_spec(dtype, shape)
    if spec.size_bytes > MAX_TENSOR_BYTES:
        raise Corrupt(f"{what}: {spec.size_bytes} bytes is over the limit of {MAX_TENSOR_BYTES}")
    return spec


def spec_of(tensor: Tensor, *, what: str = "a tensor") -> TensorSpec:
    """The spec of a live tensor; raises Unsupported, naming `what`, for a dtype without a name of
    safetensors, and for a tensor beyond its storage: reading freed memory ends the process."""
    name = _name_of(tensor)
    if name is None:
        raise Unsupported(
            f"{what}: dtype {tensor.dtype} cannot be published; cast to one of "
            f"{', '.join(WIDTHS_BY_DTYPE)}"
        )
    if isinstance(tensor, np.ndarray):
        return shared_spec(name, tensor.shape)
    if name == PAIRED and not tensor.dim():
        raise Unsupported(f"{what}: F4 numbers without a dimension: safetensors cannot hold them")
    last = tensor.storage_offset() + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if tensor.numel() and tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize:
        raise Unsupported(
            f"{what}: its memory was freed, as FSDP and offloading do: gather it, or publish the "
            "state dict that the framework makes"
        )
    return shared_spec(name, tuple(tensor.shape))


def _name_of(tensor: Tensor) -> str | None:
    """The safetensors name of its dtype."""
    return _NAMES.get(str(tensor.dtype).removeprefix("torch."))


def address_of(tensor: Tensor) -> int:
    """Address of its first element; 0 without memory of its own."""
    if isinstance(tensor, np.ndarray):
        return tensor.ctypes.data if tensor.size else 0
    return tensor.data_ptr()


def memory_of(tensor: Tensor) -> object:
    """A key, equal for tensors with equal views of one memory; None without memory of its own: an
    empty tensor, one on the meta device, and a subclass that wraps others."""
    if not (address := address_of(tensor)):
        return None
    if isinstance(tensor, np.ndarray):
        return tensor.dtype, address, tensor.shape, tensor.strides
    return tensor.device, tensor.dtype, address, tensor.shape, tensor.stride()


def is_contiguous(tensor: Tensor) -> bool:
    """Whether its elements lie in one piece, in the order of its dimensions."""
    if isinstance(tensor, np.ndarray):
        return tensor.flags.c_contiguous
    return tensor.is_contiguous()


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    if isinstance(tensor, np.ndarray):
        return bool(np.isfinite(tensor).all())
    import torch

    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    # Every F4 number is finite.
    is_bounded = not values.is_floating_point() or _name_of(values) == PAIRED
    if is_bounded or not values.numel():
        return True
    # torch compares no float8. NaN is both ends of a tensor that has one.
    ends = torch.aminmax(values.bfloat16() if values.itemsize == 1 else values)
    return bool(ends.min.isfinite() and ends.max.isfinite())


def bits_of(tensor: Tensor) -> Bits:
    """The bits of a contiguous CPU tensor, sharing its memory."""
    if not is_contiguous(tensor):
        raise Unsupported("tensor is not contiguous: call `.contiguous()` first")
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1).view(UNSIGNED_NUMPY[tensor.itemsize])
    if tensor.device.type != "cpu":
        raise Unsupported(f"tensor on {tensor.device}: copy it to the CPU first (`tensor.cpu()`)")
    unsigned = torch_dtypes()[f"U{8 * tensor.dtype.itemsize}"]
    bits: Bits = tensor.detach().reshape(-1).view(unsigned).numpy()
    return bits


def bits_from_bytes(data: Bytes, spec: TensorSpec) -> Bits:
    """Raw little-endian bytes as the bits of a tensor, in the same memory; raises Corrupt."""
    if data.size != spec.size_bytes:
        raise Corrupt(f"{data.size} bytes where {spec} needs {spec.size_bytes}")
    return data.view(UNSIGNED_NUMPY[spec.width_bytes])


def bytes_of(bits: Bits) -> Bytes:
    """The bits as bytes, sharing memory."""
    return bits.view(np.uint8)


def tensor_from_bits(bits: Bits, spec: TensorSpec) -> "torch.Tensor":
    """A tensor over the same memory."""
    import torch

    return torch.from_numpy(bits).view(torch_dtypes()[spec.dtype]).reshape(spec.shape)


def zero_tensor(spec: TensorSpec) -> "torch.Tensor":
    """A tensor of zero bits in its own memory."""
    return tensor_from_bits(np.zeros(spec.elements, UNSIGNED_NUMPY[spec.width_bytes]), spec)


@cache
def torch_dtypes() -> Mapping[str, "torch.dtype"]:
    """The torch dtype of every safetensors name."""
    import torch

    return {name: getattr(torch, torch_name) for name, torch_name in _TORCH_NAMES.items()}
