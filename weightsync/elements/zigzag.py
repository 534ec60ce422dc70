"""Maps small differences of either sign to small numbers: 0, -1, 1, -2 to 0, 1, 2, 3.

Without branches: signs are random, and a misprediction costs more than the rest.
"""

import numpy as np

from weightsync.elements.compiled import compiled

_NONE = np.uint64(0)
_ONE = np.uint64(1)


@compiled
def zigzag(difference: np.uint64, mask: np.uint64) -> np.uint64:
    """The code of a difference modulo `mask` + 1."""
    negative = np.uint64(difference > (mask >> _ONE))
    return ((difference << _ONE) ^ (_NONE - negative)) & mask


@compiled
def unzigzag(code: np.uint64) -> np.uint64:
    """The difference modulo 2 to the 64th."""
    return (code >> _ONE) ^ (_NONE - (code & _ONE))
