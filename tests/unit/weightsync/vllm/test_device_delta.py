"""What torch makes of a delta is what the compiled loops make of it, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.elements.bits import Bits, TensorSpec, bits_of
from weightsync.encoding.codec import Encoding, decode, encode, encode_as
from weightsync.encoding.delta import Delta, checked_apply
from weightsync.vllm.device_delta import apply_on_device

SPECS = {
    "U8": (np.uint8, torch.uint8),
    "BF16": (np.uint16, torch.bfloat16),
    "F32": (np.uint32, torch.float32),
    "I64": (np.uint64, torch.int64),
}


def _states(dtype: str, size: int, density: float, seed: int) -> tuple[Bits, Bits]:
    random = np.random.default_rng(seed)
    integer = SPECS[dtype][0]
    old = random.integers(0, np.iinfo(integer).max, size, dtype=integer, endpoint=True)
    new = old.copy()
    hit = random.random(size) < density
    steps = random.choice(np.array([1, np.iinfo(integer).max, 77], dtype=integer), size)
    new[hit] += steps[hit]
    far = hit & (random.random(size) < 0.2)
    new[far] = random.integers(0, np.iinfo(integer).max, int(far.sum()), dtype=integer)
    return old, new


def _on_device(delta: Delta, old: Bits, dtype: str) -> Bits:
    tensor = torch.from_numpy(old.copy()).view(SPECS[dtype][1])
    apply_on_device(delta, tensor)
    return bits_of(tensor)


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("dtype", list(SPECS))
@given(st.integers(1, 3000), st.sampled_from([0.0005, 0.01, 0.3, 1.0]), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25)
def test_every_encoding_gives_the_same_elements(
    encoding: Encoding, dtype: str, size: int, density: float, seed: int
) -> None:
    old, new = _states(dtype, size, density, seed)
    encoded = encode_as(encoding, old, new)
    if encoded is not None:
        delta = decode(encoding, memoryview(encoded.payload), TensorSpec(dtype, (size,)))
        assert (_on_device(delta, old, dtype) == new).all()


@pytest.mark.parametrize("dtype", list(SPECS))
def test_planes_are_the_same_too(dtype: str) -> None:
    old = np.arange(20_000, dtype=SPECS[dtype][0])
    new = old + np.arange(20_000, dtype=SPECS[dtype][0]) % 5 - SPECS[dtype][0](2)
    encoded = encode(old, new)
    assert encoded is not None
    delta = decode(encoded.encoding, memoryview(encoded.payload), TensorSpec(dtype, (old.size,)))
    assert type(delta).__name__ == "PlanesDelta"
    assert (_on_device(delta, old, dtype) == new).all()


def test_a_tensor_of_another_size_is_refused() -> None:
    old = np.zeros(100, dtype=np.uint16)
    encoded = encode_as(Encoding.ROSEMUX, old, old + np.uint16(1))
    assert encoded is not None
    delta = decode(Encoding.ROSEMUX, memoryview(encoded.payload), TensorSpec("BF16", (100,)))
    checked_apply(delta, old)
    with pytest.raises(ValueError, match="100 elements, tensor of 99"):
        apply_on_device(delta, torch.zeros(99, dtype=torch.bfloat16))
