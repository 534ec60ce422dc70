"""Compilation of this package's hot loops, with their Python signatures kept for mypy."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy.typing as npt

Records = npt.NDArray[Any]
"""A structured array, one record a job or a node."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    return cast(Callable[_P, _R], numba.njit(cache=True, nogil=True, error_model="numpy")(function))
