"""Long work in the event loop, in parts: after each few milliseconds of it others get the loop."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from harvester.contracts.clock import MonotonicClock

_HELD_S = 0.02
"""Time for which one piece of work may hold the loop, in s: a token waits so long for its turn to
be read without a reader's notice."""

AT_ONCE = 16
"""Turns begun, or left, in one pass of the loop. Some 0.5 ms each, in this pass and the next three,
in which their tasks start: a clock would see only the first part of it."""
ENTERED_AT_ONCE = 64
"""The same of requests. With 16 of them a busy gateway reads tokens more one by one, which costs it
6 % of its requests."""

_CLOCK = MonotonicClock()
T = TypeVar("T")


class LoopShare:
    """One piece of work's time in the loop, from its making on."""

    def __init__(self) -> None:
        self._until_s = _CLOCK.now() + _HELD_S

    async def rest(self) -> None:
        """Gives the loop to others if this work has held it for long."""
        if _CLOCK.now() >= self._until_s:
            await asyncio.sleep(0)
            self._until_s = _CLOCK.now() + _HELD_S


async def in_shares(work: Iterable[T]) -> list[T]:
    """All items of a lazy iterable, each of which takes a moment to make. Raises what it raises;
    what is left is not made then."""
    share, made = LoopShare(), []
    for each in work:
        made.append(each)
        await share.rest()
    return made


class LoopEntry:
    """Lets in so many of what comes at once in each pass of the loop, in its order: a step's
    thousands of requests come in one."""

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
            # One whose client has left takes no place.
            if not waiting.done():
                waiting.set_result(None)
                self._room -= 1
        self._resets = self._room < ENTERED_AT_ONCE
        if self._resets:
            asyncio.get_running_loop().call_soon(self._passed)
