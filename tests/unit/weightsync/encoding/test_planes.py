"""Planes of tensors of several runs: the same bits as in one piece, whatever the streams become."""

from contextlib import suppress

import numpy as np
import pytest

from harvester.contracts.errors import Corrupt
from weightsync.elements.bits import Bits, TensorSpec
from weightsync.encoding.codec import Encoding, apply_own, decode, encode
from weightsync.encoding.delta import checked_apply
from weightsync.encoding.planes import RUN_ELEMENTS

DTYPES = {"U8": np.uint8, "BF16": np.uint16, "F32": np.uint32, "I64": np.uint64}
SIZES = [RUN_ELEMENTS, RUN_ELEMENTS + 1, 2 * RUN_ELEMENTS, 2 * RUN_ELEMENTS + 77]


def _states(dtype: str, size: int, *, low_bits: int) -> tuple[Bits, Bits]:
    """Two states: every element changes within its `low_bits` low bits."""
    random = np.random.default_rng(size)
    old = random.integers(0, 1 << 8, size, dtype=DTYPES[dtype], endpoint=False)
    change = random.integers(1, 1 << low_bits, size, dtype=np.uint64).astype(DTYPES[dtype])
    return old, old ^ change


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("low_bits", [2, 8])
def test_a_tensor_that_changes_everywhere_is_exact(dtype: str, size: int, low_bits: int) -> None:
    """With two bits the lowest plane packs, with eight it is stored as it is."""
    old, new = _states(dtype, size, low_bits=low_bits)
    encoded = encode(old, new)
    assert encoded is not None
    spec, payload = TensorSpec(dtype, (size,)), memoryview(encoded.payload)
    assert len(payload) < 1.25 * size
    whole = old.copy()
    checked_apply(decode(encoded.encoding, payload, spec), whole)
    assert (whole == new).all()
    own = old.copy()
    apply_own(encoded.encoding, payload, spec, own)
    assert (own == new).all()


@pytest.mark.parametrize("encoding", list(Encoding))
def test_a_payload_of_ours_that_was_damaged_is_corrupt_or_stays_in_range(
    encoding: Encoding,
) -> None:
    old, new = _states("BF16", 3000, low_bits=7)
    encoded = encode(old, new)
    assert encoded is not None
    for at in range(0, len(encoded.payload), 97):
        damaged = bytearray(encoded.payload)
        damaged[at] ^= 0x55
        guarded = np.full(old.size + 128, 0xA5, dtype=old.dtype)
        guarded[64:-64] = old
        for payload in (damaged, damaged[:at]):
            with suppress(Corrupt):
                apply_own(
                    encoding, memoryview(payload), TensorSpec("BF16", (3000,)), guarded[64:-64]
                )
            assert (guarded[:64] == 0xA5).all()
            assert (guarded[-64:] == 0xA5).all()
