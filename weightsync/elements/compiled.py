"""How loops are compiled: by numba, kept on disk, without Python's lock."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.extending import intrinsic

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A loop over arrays and numbers."""
    return cast(Callable[_P, _R], numba.njit(cache=True, nogil=True)(function))


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A part of a loop: compiled into it, where a call with arrays would take longer than it."""
    made = numba.njit(cache=True, nogil=True, forceinline=True)(function)
    return cast(Callable[_P, _R], made)


def generated(function: Callable[..., Any]) -> Any:
    """A few instructions that numba cannot say, given as LLVM's; for compiled code only."""
    return intrinsic(function)
