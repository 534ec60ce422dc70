"""Admin calls to the gateway: the served job, its harvesting, its status."""

import asyncio
from typing import Any

import aiohttp

from harvester.contracts.errors import PeerProtocolError

_POLL_S = 0.2


class GatewayAdmin:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def activate(self, job: str) -> None:
        """Every dedicated engine serves this job's newest version on return."""
        await self._post(f"/v1/jobs/{job}/activate", None)

    async def harvesting(self, job: str, *, enabled: bool) -> None:
        await self._post(f"/v1/jobs/{job}/harvesting", {"enabled": enabled})

    async def dedicated(self, job: str, *, enabled: bool) -> None:
        """Sets whether the job's turns may run on dedicated engines."""
        await self._post(f"/v1/jobs/{job}/dedicated", {"enabled": enabled})

    async def status(self) -> dict[str, Any]:
        async with self._session.get(f"{self._url}/v1/status") as response:
            status: dict[str, Any] = await response.json()
            return status

    async def guest_gone(self, engine: str, *, timeout_s: float) -> bool:
        """Wait until a guest serves no more; False when it still does after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    member = (await self.status())["engines"].get(engine)
                    if member is None or member["state"] != "serving":
                        return True
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return False

    async def _post(self, path: str, body: dict[str, Any] | None) -> None:
        async with self._session.post(self._url + path, json=body) as response:
            if response.status != 200:
                message = (await response.text())[:500]
                raise PeerProtocolError(f"gateway {path}: {response.status} {message}")
