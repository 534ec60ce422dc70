"""States of a small model as training leaves them, from a seed: what every claim is held against.

Two megabytes in fifty tensors of eight dtypes, a scalar and an empty one among them. From one state
to the next a few per cent of the elements move, most of them by one unit in the last place; NaNs
with payloads and signed zeros come by.
"""

from functools import lru_cache

import numpy as np
import torch

from weightsync.elements.bits import Bits, Layout, TensorSpec, tensor_from_bits
from weightsync.elements.state_hash import combined, digest_of

COUNT = 12
_LAYERS = 11
_MOVED_RATIO = 0.03
_FAR_RATIO = 0.12
"""Share of the moving elements that move by more than one unit, as in training."""
_ANYTHING_RATIO = 0.12
"""Share of the moving elements that change to any bits at all."""
_ANYTHING_OF_LARGE_RATIO = 0.004
"""Share small enough that the large tensors are in groups, which leave many wide differences to
`sparse`."""
_LARGE_ELEMENTS = 30_000
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

State = dict[str, Bits]


def _layout() -> Layout:
    layout = {
        "embed.weight": TensorSpec("BF16", (1000, 96)),
        "head.weight": TensorSpec("F16", (96, 257)),
        "mask": TensorSpec("BOOL", (67,)),
        "nothing": TensorSpec("F32", (0, 5)),
        "steps": TensorSpec("I64", ()),
    }
    for layer in range(_LAYERS):
        layout |= {
            f"layers.{layer}.mlp.weight": TensorSpec("BF16", (128, 301)),
            f"layers.{layer}.attention.weight": TensorSpec("BF16", (127, 200)),
            f"layers.{layer}.norm.weight": TensorSpec("F32", (301,)),
            f"layers.{layer}.scale": TensorSpec("F8_E4M3", (77, 33)),
        }
    return layout


LAYOUT = _layout()


@lru_cache(maxsize=4)
def states(seed: int) -> tuple[State, ...]:
    """COUNT consecutive states."""
    rng = np.random.default_rng(seed)
    run = [{name: _first(rng, spec) for name, spec in LAYOUT.items()}]
    for _ in range(1, COUNT):
        run.append({name: _moved(rng, name, bits) for name, bits in run[-1].items()})
    return tuple(run)


@lru_cache(maxsize=4)
def hashes(seed: int) -> tuple[str, ...]:
    """Their state hashes."""
    return tuple(
        combined({name: digest_of(bits) for name, bits in state.items()}, LAYOUT)
        for state in states(seed)
    )


def dim_of(name: str) -> int | None:
    """The dimension that tensor-parallel ranks cut a tensor along."""
    if len(LAYOUT[name].shape) < 2 or not LAYOUT[name].elements:
        return None
    return 0 if name.startswith("embed") or ".mlp." in name else 1


def tensors(state: State) -> dict[str, torch.Tensor]:
    """The state as a trainer hands it to a publisher; the memory is shared."""
    return {name: tensor_from_bits(bits, LAYOUT[name]) for name, bits in state.items()}


def _first(rng: np.random.Generator, spec: TensorSpec) -> Bits:
    if spec.dtype == "BOOL":
        return rng.integers(0, 2, spec.elements, dtype=np.uint8)
    values = rng.standard_normal(spec.elements, dtype=np.float32)
    if spec.dtype in {"F32", "BF16"}:
        raw = values.view(np.uint32)
        return raw.copy() if spec.dtype == "F32" else (raw >> 16).astype(np.uint16)
    return rng.integers(0, 64, spec.elements).astype(_UNITS[spec.width_bytes])


def _moved(rng: np.random.Generator, name: str, bits: Bits) -> Bits:
    new = bits.copy()
    if name == "mask":
        new[rng.integers(new.size)] ^= 1
        return new
    if name == "steps":
        return new + new.dtype.type(1)
    at = np.flatnonzero(rng.random(new.size) < _MOVED_RATIO)
    unit = new.dtype.type(1)
    new[at] = np.where(rng.random(at.size) < 0.5, new[at] + unit, new[at] - unit)
    far = at[rng.random(at.size) < _FAR_RATIO]
    new[far] += rng.integers(2, 60, far.size).astype(new.dtype)
    ratio = _ANYTHING_RATIO if new.size < _LARGE_ELEMENTS else _ANYTHING_OF_LARGE_RATIO
    anything = at[rng.random(at.size) < ratio]
    new[anything] = rng.integers(0, 1 << 8 * min(new.itemsize, 4), anything.size)
    return new
