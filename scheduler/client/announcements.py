"""Open announcements of a job's versions: a later version ends the calls of earlier ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harvester.contracts.errors import Stale


class Announcements:
    def __init__(self) -> None:
        self._open: dict[asyncio.Timeout, int] = {}

    @asynccontextmanager
    async def announcing(self, version: int) -> AsyncIterator[None]:
        """Around the call of one version. Raises Stale once a later version is announced: sent
        again after that, this one would be taken for another run's."""
        later = f"version {version} was overtaken by the announcement of a later one"
        if max(self._open.values(), default=0) > version:
            raise Stale(later)
        for each in [each for each, other in self._open.items() if other < version]:
            del self._open[each]  # A call that ends already cannot be ended again.
            each.reschedule(0.0)
        cut = asyncio.timeout(None)
        try:
            async with cut:
                self._open[cut] = version
                yield
        except TimeoutError as error:
            raise Stale(later) from error
        finally:
            self._open.pop(cut, None)
