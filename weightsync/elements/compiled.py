"""Compiles loops with numba, without Python's lock, and caches them on disk if possible.

A container without a writable cache directory (read-only site-packages, no home) compiles in every
process; so does one with a full disk. `warm_up` in the codec decides when.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import types
from numba.core.caching import NullCache
from numba.extending import intrinsic

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ELEMENTS = Path(__file__).parent
_loops: list[Any] = []


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A loop over arrays and numbers; it may call loops of its own folder and of this one."""
    return cast(Callable[_P, _R], _loop(numba.njit(nogil=True)(function)))


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A part of a loop: compiled into it, where a call with arrays would take longer than it."""
    return cast(Callable[_P, _R], _loop(numba.njit(nogil=True, forceinline=True)(function)))


def generated(signature: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """A few instructions that numba cannot say, given as LLVM's; for compiled code only.

    `signature`: numba's, from the types of the arguments. The function takes (context, builder,
    signature, arguments) and returns the value of the last instruction, or None.
    """

    def made(build: Callable[..., Any]) -> Any:
        def typed(_typing: Any, *kinds: Any) -> Any:
            def generate(context: Any, *given: Any) -> Any:
                value = build(context, *given)
                return context.get_dummy_value() if value is None else value

            return signature(*kinds), generate

        # numba asks for the number of arguments.
        first = inspect.Parameter("_typing", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = inspect.signature(signature).parameters.values()
        typed.__signature__ = inspect.Signature([first, *arguments])  # type: ignore[attr-defined]
        typed.__name__ = build.__name__
        return intrinsic(typed)

    return made


def is_cached() -> bool:
    """Whether another process loads the loops that this one compiles."""
    return not any(isinstance(loop._cache, NullCache) for loop in _loops)


def forget_cache() -> None:
    """Compile without cache files from now on: the cache cannot be written or read."""
    for loop in _loops:
        loop._cache = NullCache()


def _loop(loop: Any) -> Any:
    # numba compares a cache file with its loop's own file only, although callees and constants of
    # other files are compiled into it. The name is part of the cache file's name.
    own = Path(loop.py_func.__code__.co_filename).parent
    loop.py_func.__qualname__ += f"-{_sources_digest(own, _ELEMENTS)}"
    # Refused where there is no directory that this user may write.
    with suppress(RuntimeError):
        loop.enable_caching()
    template_of = loop.get_call_template
    # numba would compile once more for every number that is constant where a loop is called.
    loop.get_call_template = lambda args, named: template_of((*map(types.unliteral, args),), named)
    _loops.append(loop)
    return loop


@cache
def _sources_digest(*folders: Path) -> str:
    digest = sha256()
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
