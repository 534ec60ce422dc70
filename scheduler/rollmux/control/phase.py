"""A phase as a context manager: entered with its permit, left when its nodes are empty."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import ContextDecorator, suppress
from types import TracebackType
from typing import Protocol, TypeVar

from harvester.contracts.errors import Exhausted
from scheduler.model import PhaseKind
from scheduler.rollmux.control.permit import Permit

T = TypeVar("T")


class PermitSource(Protocol):
    """Begins and ends the permits of a `Phase`."""

    def begin(self, kind: PhaseKind, *, cancelled: threading.Event | None = None) -> Permit: ...

    def end(self, permit: Permit, *, failed: str = "") -> None: ...


class Phase(ContextDecorator):
    """Used with `with`, `async with` or as a decorator of a function that is not asynchronous.

    Any number of times, by one thread or task at a time.
    """

    def __init__(self, source: Callable[[], PermitSource], kind: PhaseKind) -> None:
        self._source = source
        self._kind = kind
        self._permit: Permit | None = None

    def __enter__(self) -> Permit:
        self._permit = self._source().begin(self._kind)
        return self._permit

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._permit is not None
        failed = "" if error is None else f"{type(error).__name__}: {error}"
        self._source().end(self._permit, failed=failed)

    async def __aenter__(self) -> Permit:
        cancelled = threading.Event()
        beginning = asyncio.ensure_future(
            asyncio.to_thread(self._source().begin, self._kind, cancelled=cancelled)
        )
        try:
            self._permit = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            cancelled.set()
            with suppress(Exhausted):
                # A permit that still came is given back.
                permit = await _outlasted(beginning)
                await _outlasted(asyncio.to_thread(self._source().end, permit, failed="cancelled"))
            raise
        return self._permit

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The nodes are given back even if the task is cancelled meanwhile.
        ending = asyncio.ensure_future(asyncio.to_thread(self.__exit__, kind, error, trace))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await _outlasted(ending)
            raise


async def _outlasted(work: Awaitable[T]) -> T:
    """The outcome of the work, however often the task is cancelled meanwhile."""
    future = asyncio.ensure_future(work)
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(future)
    return future.result()
