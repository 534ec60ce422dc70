"""One piece of work done in the background while the engine runs, handed over in the pause.

Holds at most one result, that of the newest key asked for. All work runs on one thread, so that no
two pieces ever overlap. The caller decides what the work is and whether its result still fits.
"""

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")


class StageState(StrEnum):
    RUNNING = "running"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """How far the work for one key is."""

    state: StageState
    message: str = ""
    """Why it failed."""


class Stager(Generic[T]):
    """`begin` and `take` are called from one thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-stage")
        self._key: Hashable = None
        self._work: Future[T] | None = None

    def begin(self, key: Hashable, work: Callable[[], T]) -> StageStatus:
        """Starts `work` unless work with this key runs or is ready; returns its status. After a
        failure was returned, the next call starts again."""
        held = self._held(key)
        if held is None:
            self._key, self._work = key, self._thread.submit(work)
            return StageStatus(state=StageState.RUNNING)
        if not held.done():
            return StageStatus(state=StageState.RUNNING)
        error = held.exception()
        if error is None:
            return StageStatus(state=StageState.READY)
        self._work = None
        return StageStatus(state=StageState.FAILED, message=f"{type(error).__name__}: {error}")

    def ready(self, key: Hashable) -> T | None:
        """The result for `key`, which stays here; None unless it is there."""
        held = self._held(key)
        return held.result() if held and held.done() and held.exception() is None else None

    def take(self, key: Hashable, work: Callable[[], T]) -> T:
        """The result for `key`: waits for running work, or works now if none runs or it failed."""
        held, self._work = self._held(key), None
        if held is not None and held.exception() is None:
            return held.result()
        return self._thread.submit(work).result()

    def later(self, work: Callable[[], object]) -> None:
        """Run work in the background that no caller waits for, such as freeing memory."""
        self._thread.submit(work)

    def clear(self) -> None:
        """Waits for running work and drops its result; the next `begin` starts again."""
        held, self._work = self._work, None
        if held is not None:
            held.exception()

    def _held(self, key: Hashable) -> "Future[T] | None":
        return self._work if self._key == key else None
