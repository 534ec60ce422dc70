"""Small differences of either sign as small numbers: 0, -1, 1, -2 to 0, 1, 2, 3."""

import numpy as np

from weightsync.compiled import compiled

_ONE = np.uint64(1)


@compiled
def zigzag(difference: np.uint64, mask: np.uint64) -> np.uint64:
    """Of a difference modulo `mask` + 1."""
    if difference > (mask >> _ONE):
        return (((~difference) & mask) << _ONE) | _ONE
    return difference << _ONE


@compiled
def unzigzag(code: np.uint64) -> np.uint64:
    """The difference modulo 2 to the 64th."""
    if code & _ONE:
        return ~(code >> _ONE)
    return code >> _ONE
