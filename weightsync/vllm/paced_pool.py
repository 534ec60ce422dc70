"""Threads that do an engine's weight work piece by piece, and ask before each piece.

Beside production on the same accelerator, decoding or writing a version may take no more of it than
a step may. `Pace` decides the times.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Pace(Protocol):
    """Called from any thread."""

    def piece(self) -> AbstractContextManager[None]:
        """Waits until a piece of work may run; measures it."""

    def hurry(self) -> AbstractContextManager[None]:
        """No piece waits within it."""


class PacedPool(Executor):
    """Every call is a piece: a batch of megabytes (see batches.py), or one tensor."""

    def __init__(self, threads: int, *, settle: Callable[[], None] | None = None) -> None:
        """`settle` waits for the accelerator work of a piece; None without such work"""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="weight-apply")
        self._settle = settle
        self.pace: Pace | None = None
        """Paces the work beside a production engine; None without one."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        pace = self.pace
        if pace is None:
            return self._threads.submit(fn, *args, **kwargs)
        return self._threads.submit(self._piece, pace, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)

    def _piece(self, pace: Pace, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
        with pace.piece():
            done = fn(*args, **kwargs)
            if self._settle is not None:
                self._settle()
            return done
