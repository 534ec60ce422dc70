"""Long work in the event loop, in parts: after each few milliseconds of it others get the loop."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from harvester.contracts.clock import MonotonicClock

_HELD_S = 0.02
"""Longest time for which one piece of work holds the event loop, in s: readers do not notice a
token that is this late."""

AT_ONCE = 16
"""Turns that begin or end in one pass of the loop. Each takes about 0.5 ms, spread over this pass
and the next three; a clock would see only the first part."""
ENTERED_AT_ONCE = 64
"""Requests that enter in one pass of the loop. With 16, a busy gateway reads tokens one by one more
often and serves 6 % fewer requests."""

_CLOCK = MonotonicClock()
T = TypeVar("T")


class LoopShare:
    """The loop time of one piece of work, counted from its creation."""

    def __init__(self) -> None:
        self._until_s = _CLOCK.now() + _HELD_S

    async def rest(self) -> None:
        """Gives the loop to other tasks if this work has held it for `_HELD_S`."""
        if _CLOCK.now() >= self._until_s:
            await asyncio.sleep(0)
            self._until_s = _CLOCK.now() + _HELD_S


async def in_shares(work: Iterable[T]) -> list[T]:
    """Evaluates a lazy iterable and regularly gives the loop to other tasks. Raises what the
    iterable raises; later items are then not evaluated."""
    share, made = LoopShare(), []
    for each in work:
        made.append(each)
        await share.rest()
    return made


class LoopEntry:
    """Admits ENTERED_AT_ONCE requests in each pass of the loop, in order of arrival: a training
    step sends thousands at once."""

    def __init__(self) -> None:
        self._room = ENTERED_AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._resets = False

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._resets:
            self._resets = True
            loop.call_soon(self._passed)
        if self._room and not self._waiting:
            self._room -= 1
            return
        self._waiting.append(waiting := loop.create_future())
        await waiting

    def _passed(self) -> None:
        self._room = ENTERED_AT_ONCE
        while self._waiting and self._room:
            waiting = self._waiting.popleft()
            # A waiter whose client has left takes no place.
            if not waiting.done():
                waiting.set_result(None)
                self._room -= 1
        self._resets = self._room < ENTERED_AT_ONCE
        if self._resets:
            asyncio.get_running_loop().call_soon(self._passed)
