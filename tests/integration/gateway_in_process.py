"""A gateway and its fake engines in the test's own process: fast, and open to look at."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from harvester.contracts.clock import MonotonicClock
from scheduler.gateway.gateway import Gateway
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.scheduler import Scheduler
from scheduler.gateway.settings import GatewaySettings
from scheduler.gateway.tenants import Tenants
from tests.integration.fake_engine import FakeEngine, next_token

PROMPT = [4, 5, 6]


class Site:
    """One port, and whichever app has it now."""

    def __init__(self) -> None:
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, app: web.Application) -> None:
        """Serves an app in the place of the previous one."""
        await self.close()
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


class GatewayInProcess:
    def __init__(self, scheduler: Scheduler, site: Site, sites: list[Site]) -> None:
        self.scheduler = scheduler
        self.sites = sites
        self._site = site
        self._session = aiohttp.ClientSession()

    @property
    def url(self) -> str:
        return self._site.url

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self._session.post(self._site.url + path, json=body) as response:
            return response.status, await response.json()

    async def generate(
        self, name: str, max_tokens: int, *, prompt: list[int] = PROMPT, **more: Any
    ) -> tuple[int, Any]:
        sampling = {"max_tokens": max_tokens, "temperature": 1.0, "seed": 1}
        body = {"request_id": name, "token_ids": prompt, "sampling_params": sampling, **more}
        status, reply = await self.post("/inference/v1/generate", body)
        return status, reply["choices"][0] if status == 200 else reply

    async def publish(self, version: int) -> tuple[int, Any]:
        return await self.post("/v1/jobs/job/versions", {"version": version, "store": "job.store"})

    async def status(self) -> Any:
        async with self._session.get(self._site.url + "/v1/status") as response:
            return await response.json()

    async def close(self) -> None:
        await self._session.close()
        await self._site.close()
        await self.scheduler.close()
        for site in self.sites:
            await site.close()


@asynccontextmanager
async def gateway_on(
    *engines: FakeEngine | str, **settings: Any
) -> AsyncIterator[GatewayInProcess]:
    """Engines are `e0`, `e1`, ... in the order given, a URL is one that runs; the job is `job`."""
    sites, urls = [], []
    for engine in engines:
        if isinstance(engine, FakeEngine):
            sites.append(Site())
            await sites[-1].serve(engine.app())
        urls.append(sites[-1].url if isinstance(engine, FakeEngine) else engine)
    listed = [{"id": f"e{at}", "url": url, "concurrency": 8} for at, url in enumerate(urls)]
    given = {"port": 0, "engines": listed, "jobs": [{"id": "job"}], **settings}
    given["timeouts"] = {"health_s": 0.05, "queue_s": 10, **given.get("timeouts", {})}
    parsed, clock = GatewaySettings.model_validate(given), MonotonicClock()
    async with aiohttp.ClientSession() as session:
        scheduler = Scheduler(parsed, clock, SchedulerState(None), session)
        await scheduler.start()
        front = Site()
        await front.serve(Gateway(scheduler, parsed, Tenants({}), clock).app)
        gateway = GatewayInProcess(scheduler, front, sites)
        try:
            yield gateway
        finally:
            await gateway.close()


def continued(token_ids: list[int], count: int, *, version: int) -> list[int]:
    """The output that an engine at this version gives."""
    said = list(token_ids)
    for _ in range(count):
        said.append(next_token(said, version))
    return said[len(token_ids) :]
