"""The guest engine's own description, queried every few seconds for the slot's offer.

An engine that does not answer is unknown again: the one that comes back may be another.
"""

import asyncio
from collections.abc import Callable

import aiohttp
import msgspec

from harvester.contracts.errors import UNDECODABLE
from harvester.contracts.wire.engines import ENGINE_ROUTE, EngineDescription, EngineReport
from harvester.platform.http_kit import body_of

_PERIOD_S = 2.0
_MOST_BYTES = 64 << 10
_UNKNOWN = EngineDescription()


class GuestDescription:
    def __init__(self, engine_url: Callable[[], str]) -> None:
        """`engine_url`: as configured now, "" where offers name no engine."""
        self._engine_url = engine_url
        self.latest = _UNKNOWN

    async def run(self) -> None:
        """Until cancelled."""
        timeout = aiohttp.ClientTimeout(total=_PERIOD_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await self.ask(session)
                await asyncio.sleep(_PERIOD_S)

    async def ask(self, session: aiohttp.ClientSession) -> None:
        url = self._engine_url().rstrip("/")
        if not url:
            self.latest = _UNKNOWN
            return
        try:
            async with session.get(url + ENGINE_ROUTE) as reply:
                raw = await body_of(reply, most_bytes=_MOST_BYTES)
            self.latest = msgspec.json.decode(raw, type=EngineReport).description
        except (aiohttp.ClientError, TimeoutError, *UNDECODABLE):
            self.latest = _UNKNOWN
