"""An event loop on its own daemon thread, for callers without a loop."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Starts on first use. A process may end without closing it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled where the wait is interrupted."""

        async def awaited() -> T:
            return await work

        running = asyncio.run_coroutine_threadsafe(awaited(), self._started())
        try:
            return running.result()
        finally:
            running.cancel()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Calls it in the loop, soon."""
        self._started().call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def close_after(self, work: Callable[[], Awaitable[object]]) -> None:
        """Does the work and closes, without a wait: for an owner that was dropped, maybe in the
        loop's own thread."""
        loop, self._loop = self._loop, None

        async def last() -> None:
            try:
                await work()
            finally:
                asyncio.get_running_loop().stop()

        if loop is not None:
            asyncio.run_coroutine_threadsafe(last(), loop)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Runs until `stop`, then cancels the tasks that are left."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()
