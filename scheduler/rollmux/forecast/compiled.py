"""Compilation of hot loops, with their Python signatures kept for mypy, and cached on disk."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy.typing as npt
from numba.core.caching import FunctionCache

Records = npt.NDArray[Any]
"""A structured array, one record a job or a node."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Cache(FunctionCache):  # type: ignore[misc]
    """A file that cannot be written or read (a full disk, a crash that cut it) costs the time to
    compile, and no decision."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with suppress(Exception):
            return super().load_overload(sig, target_context)
        with suppress(OSError):
            self.flush()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function compiled; it may call compiled functions of its own folder."""
    # numba compares a cache file with its function's own file only, although callees and constants
    # of other files are compiled into it. The name is part of the cache file's name.
    function.__qualname__ += f"-{_sources_digest(Path(function.__code__.co_filename).parent)}"
    rule = numba.njit(nogil=True, error_model="numpy")(function)
    # Refused where there is no directory that this user may write: compiled in every process then.
    with suppress(RuntimeError):
        rule._cache = _Cache(function)
    return cast(Callable[_P, _R], rule)


@cache
def _sources_digest(folder: Path) -> str:
    digest = sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
