"""Lower bound of a delta's size, if every element changes on its own.

An independent change mask of the whole state, and the entropy of the changed elements' differences
in units in the last place. Structure between elements (rows that never move) may beat it.
"""

from collections import Counter

import numpy as np

from benchmarks.weightsync.states import Pair


def entropy_bound_bytes(pair: Pair) -> int:
    elements = changed = 0
    steps: Counter[int] = Counter()
    for name, new in pair.new.items():
        old = pair.old[name]
        hit = np.flatnonzero(old != new)
        elements += new.size
        changed += hit.size
        # Modulo the width, so that both directions of a step have one number each.
        values, counts = np.unique(new[hit] - old[hit], return_counts=True)
        steps.update({int(v): int(c) for v, c in zip(values, counts, strict=True)})
    if changed == 0:
        return 0
    share = changed / elements
    bits = elements * _entropy_bits(np.array([share, 1.0 - share]))
    bits += changed * _entropy_bits(np.array(list(steps.values()), dtype=float) / changed)
    return int(np.ceil(bits / 8))


def _entropy_bits(shares: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    present = shares[shares > 0]
    return float(-(present * np.log2(present)).sum())
