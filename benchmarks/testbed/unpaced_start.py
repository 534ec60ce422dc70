"""A guest's start at full speed, before the slot has an agent.

A GPU guest asks the slot for slack before each pass of its start, and without any it waits for
nineteen times what the pass before took: right beside a production that serves, and minutes lost
where production has nothing to do yet. So the slot's grant says meanwhile that there is no law.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import Grant, GrantMode, PageDirectory, PageWriter

_AGAIN_S = 1.0
_GRANT = Grant(epoch=0, mode=GrantMode.UNGATED, reason="the guest starts beside an idle production")
_OVER = Grant(epoch=0, mode=GrantMode.CLOSED)


@asynccontextmanager
async def unpaced(pages: PageDirectory) -> AsyncIterator[None]:
    """While its context lasts; the page is gone afterwards. Raises PageHeld beside an agent."""
    page = pages.grant_writer()
    writing = asyncio.ensure_future(_write(page))
    try:
        yield
    finally:
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
        # Readers keep a page that is gone until it expires.
        page.write(_OVER, now_ns=monotonic_ns(), ttl_ns=0)
        page.close(unlink=True)


async def _write(page: PageWriter[Grant]) -> None:
    while True:
        page.write(_GRANT, now_ns=monotonic_ns(), ttl_ns=Grant.AGE_MAX_NS)
        await asyncio.sleep(_AGAIN_S)
