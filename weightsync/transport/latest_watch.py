"""One upstream request on behalf of all readers that wait for a store's next LATEST."""

import asyncio
from collections.abc import Awaitable, Callable

from harvester.contracts.clock import Clock

_TURN_S = 2.0
"""Longest duration of one request, and so of a shutdown's wait for it."""

Ask = Callable[[bytes | None, float], Awaitable[bytes | None]]
"""`known`, seconds to wait; see `StoreSource.latest`."""


class LatestWatch:
    """Asks only while a reader waits. Belongs to one event loop."""

    def __init__(self, ask: Ask, clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._turn: asyncio.Task[bytes | None] | None = None
        self._turn_knew: bytes | None = None

    async def after(self, known: bytes | None, wait_s: float) -> bytes | None:
        """LATEST once it differs from `known`, or as it is after `wait_s`. Raises what `ask`
        raises."""
        found = await self._ask(None, 0.0)
        until_s = self._clock.now() + wait_s
        while found == known and (left_s := until_s - self._clock.now()) > 0:
            if self._turn is None or self._turn.done() or self._turn_knew != known:
                self._turn_knew = known
                self._turn = asyncio.create_task(self._turned(known))
                # Every waiting reader may have left by the time it fails.
                self._turn.add_done_callback(lambda turn: turn.cancelled() or turn.exception())
            done, _ = await asyncio.wait({self._turn}, timeout=left_s)
            if done:
                found = self._turn.result()
        return found

    async def _turned(self, known: bytes | None) -> bytes | None:
        return await self._ask(known, _TURN_S)
