"""Lower bounds of a delta's size, if every element changes on its own.

Both add an independent change mask and the entropy of the changed elements' differences in units in
the last place. The first takes all elements alike. The conditional one has a mask and a table of
differences for each exponent of the old value, which a receiver knows: one step of training moves a
small value by many units and a large one by none. Structure between elements (rows that never move)
may beat either; tables are free.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import numpy as np

from benchmarks.weightsync.states import Pair
from weightsync.elements.bits import Bits

_EXPONENT_SHIFTS = {2: 7, 4: 23}
"""Where bfloat16 and float32 have their eight bits of exponent, by width in bytes."""


def entropy_bound_bytes(pair: Pair) -> int:
    """The bound that knows nothing of an element."""
    return _bound_bytes(pair, lambda old: np.zeros(old.size, dtype=np.uint8))


def conditional_bound_bytes(pair: Pair) -> int:
    """The bound that knows the exponent of each old value; other widths have none."""
    return _bound_bytes(pair, _exponents)


def _exponents(old: Bits) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    shift = _EXPONENT_SHIFTS.get(old.itemsize)
    if shift is None:
        return np.zeros(old.size, dtype=np.uint8)
    return (old >> shift).astype(np.uint8)  # the sign is cut off


def _bound_bytes(
    pair: Pair, classes_of: Callable[[Bits], np.ndarray[tuple[int], np.dtype[np.uint8]]]
) -> int:
    elements = np.zeros(256, dtype=np.int64)
    steps: dict[int, Counter[int]] = defaultdict(Counter)
    for name, new in pair.new.items():
        old = pair.old[name]
        classes = classes_of(old)
        elements += np.bincount(classes, minlength=256)
        hit = np.flatnonzero(old != new)
        # Modulo the width, so that both directions of a step have one number each.
        moved, of = new[hit] - old[hit], classes[hit]
        for each in np.unique(of):
            values, counts = np.unique(moved[of == each], return_counts=True)
            steps[int(each)].update({int(v): int(c) for v, c in zip(values, counts, strict=True)})
    bits = 0.0
    for each, found in steps.items():
        total, changed = int(elements[each]), found.total()
        bits += total * _entropy_bits([changed, total - changed])
        bits += changed * _entropy_bits(found.values())
    return int(np.ceil(bits / 8))


def _entropy_bits(counts: Iterable[int]) -> float:
    shares = np.array([*counts], dtype=float)
    shares = shares[shares > 0] / shares.sum()
    return float(-(shares * np.log2(shares)).sum())
