"""The bounds that deltas are held against, on steps whose entropy is known."""

import numpy as np
import pytest

from benchmarks.weightsync.bound import conditional_bound_bytes, entropy_bound_bytes
from benchmarks.weightsync.contenders import CONTENDERS
from benchmarks.weightsync.states import Pair

ELEMENTS = 1 << 16


def _pair(old: np.ndarray, new: np.ndarray) -> Pair:
    return Pair(name="step", old={"a": old}, new={"a": new})


def test_an_unchanged_state_has_no_entropy() -> None:
    same = np.zeros(ELEMENTS, dtype=np.uint16)
    assert (entropy_bound_bytes(_pair(same, same)), conditional_bound_bytes(_pair(same, same))) == (
        0,
        0,
    )


def test_a_change_that_the_exponent_tells_is_free_only_under_the_conditional_bound() -> None:
    """Every element of one exponent moves, none of the other: 1 bit an element if unknown."""
    old = np.zeros(ELEMENTS, dtype=np.uint16)
    old[::2] = 0x3F80
    new = old + (old > 0)
    assert entropy_bound_bytes(_pair(old, new)) == ELEMENTS // 8
    assert conditional_bound_bytes(_pair(old, new)) == 0


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64])
def test_other_widths_have_one_bound(dtype: type) -> None:
    old = np.arange(ELEMENTS).astype(dtype)
    new = old + (np.arange(ELEMENTS) % 4 == 0).astype(dtype)
    bounds = entropy_bound_bytes(_pair(old, new)), conditional_bound_bytes(_pair(old, new))
    assert bounds[0] == bounds[1] == pytest.approx(0.8113 * ELEMENTS / 8, rel=1e-3)


@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_every_contender_is_exact(name: str, dtype: type) -> None:
    generator = np.random.default_rng(1)
    old = generator.integers(0, 1 << 16, ELEMENTS).astype(dtype)
    new = old + (generator.random(ELEMENTS) < 0.01).astype(dtype)
    contender = CONTENDERS[name]
    assert contender.encode(old, old.copy()) is None
    encoded = contender.encode(old, new)
    assert encoded is not None
    payload, size, digest = encoded
    held = old.copy()
    assert contender.apply(payload, held) == digest
    assert (held == new).all()
    assert 0 < size < new.nbytes
