"""Tracks whether upstream answers; while it does not, remembered answers are used."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from harvester.contracts.errors import Exhausted

T = TypeVar("T")

PATIENCE_S = 5.0
"""Seconds to wait for an answer that a remembered one could replace."""
_PROBE_EVERY_S = 1.0


class Outage:
    """Begins when a request stays open for too long, and ends when a probe is answered.

    Meanwhile no reader waits for upstream. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._probing: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        return self._probing is not None and not self._probing.done()

    async def asked(
        self,
        ask: Callable[[], Awaitable[T]],
        recall: Callable[[], T | None],
        probe: Callable[[], Awaitable[object]],
        *,
        wait_s: float = 0.0,
    ) -> T:
        """The result of `ask`, or of `recall` if `ask` takes longer than `wait_s` plus PATIENCE_S.
        Without a remembered answer, waits for `ask`."""
        if self.is_on and (held := recall()) is not None:
            return held
        asking = asyncio.ensure_future(ask())
        asking.add_done_callback(_heard)
        done, _ = await asyncio.wait({asking}, timeout=wait_s + PATIENCE_S)
        if not done or isinstance(asking.exception(), Exhausted):
            held = recall()
            if held is not None:
                self._begin(probe)
                return held
        return await asking

    async def over(self, timeout_s: float) -> bool:
        """Wait for the end of the outage; returns whether it ended in time."""
        if self._probing is not None and self.is_on:
            await asyncio.wait({self._probing}, timeout=timeout_s)
        return not self.is_on

    def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()

    def _begin(self, probe: Callable[[], Awaitable[object]]) -> None:
        if not self.is_on:
            self._probing = asyncio.create_task(_until_answered(probe))


async def _until_answered(probe: Callable[[], Awaitable[object]]) -> None:
    while True:
        await asyncio.sleep(_PROBE_EVERY_S)
        try:
            await probe()
        except Exhausted:
            continue
        except Exception:
            # Any other answer shows that upstream is reachable.
            return
        return


def _heard(asking: "asyncio.Future[Any]") -> None:
    """Retrieve a late exception: the reader may have left by then."""
    if not asking.cancelled():
        asking.exception()
