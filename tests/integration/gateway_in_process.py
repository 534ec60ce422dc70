"""A gateway and its fake engines in the test's own process: fast, and open to look at."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.ids import EngineId, Epoch, JobId, LeaseId, SlotId
from harvester.platform.http_kit import listen, serving
from harvester.platform.tenants import Tenants
from harvester.platform.tls import ServerTls
from scheduler.gateway.gateway import Gateway
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.scheduler import Scheduler
from scheduler.gateway.settings import GatewaySettings
from scheduler.model import Engine, EngineKind, Lease
from tests.integration.conftest import PATIENT
from tests.integration.fake_engine import FakeEngine, next_token
from tests.integration.openapi_replies import check_reply

PROMPT = [4, 5, 6]


class Site:
    """One port, and whichever app has it now."""

    def __init__(self, tls: ServerTls | None = None) -> None:
        self.port = 0
        self.tls = tls
        self._serving = AsyncExitStack()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    async def serve(self, app: web.Application) -> None:
        """Serves an app in the place of the previous one."""
        await self.close()
        runner = await self._serving.enter_async_context(serving(app, shutdown_s=0.01))
        await listen(runner, "127.0.0.1", self.port, remedy="", tls=self.tls)
        self.port = runner.addresses[0][1]

    async def close(self) -> None:
        await self._serving.aclose()


class GatewayInProcess:
    def __init__(
        self, scheduler: Scheduler, service: Gateway, site: Site, sites: list[Site]
    ) -> None:
        self.scheduler = scheduler
        self.service = service
        self.sites = sites
        self._site = site
        self._session = aiohttp.ClientSession()

    @property
    def url(self) -> str:
        return self._site.url

    async def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        url = self._site.url + path
        async with self._session.post(url, json=body, headers=headers) as response:
            reply = await response.json()
        check_reply("POST", path, response.status, reply)
        return response.status, reply

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(self._site.url + path) as response:
            reply = await response.json()
        check_reply("GET", path, response.status, reply)
        return response.status, reply

    async def until(self, holds: Callable[[], Any], *, timeout_s: float = 60.0) -> None:
        """Waits for a fact of this process, looking often."""
        async with asyncio.timeout(timeout_s):
            while not holds():  # noqa: ASYNC110 - facts without an event
                await asyncio.sleep(0.005)

    async def until_tokens(self, count: int, *, turns: int = 1) -> None:
        """Waits until this many open turns of the job have `count` tokens each."""
        ledger = self.scheduler.ledgers[JobId("job")]

        def has() -> bool:
            return sum(len(turn.token_ids) >= count for turn in ledger.turns()) >= turns

        await self.until(has)

    async def add_guest(self, guest: FakeEngine) -> EngineId:
        """The fleet has a guest more, on a lease that lasts."""
        site, name = Site(), EngineId("guest")
        self.sites.append(site)
        await site.serve(guest.app())
        lease = Lease(
            lease=LeaseId("l"),
            slot=SlotId("s"),
            agent="a",
            job=JobId("job"),
            epoch=Epoch(1),
            expires_s=MonotonicClock().now() + 3600,
        )
        offered = Engine(
            engine=name, kind=EngineKind.GUEST, url=site.url, concurrency=4, numerics=""
        )
        client = self.scheduler.engine_client(site.url)
        self.scheduler.fleet.add(offered, client, lease=lease)
        return name

    async def generate(
        self,
        name: str,
        max_tokens: int,
        *,
        prompt: list[int] = PROMPT,
        sampling: dict[str, Any] | None = None,
        **more: Any,
    ) -> tuple[int, Any]:
        params = {"max_tokens": max_tokens, "temperature": 1.0, "seed": 1, **(sampling or {})}
        body = {"request_id": name, "token_ids": prompt, "sampling_params": params, **more}
        status, reply = await self.post("/inference/v1/generate", body)
        return status, reply["choices"][0] if status == 200 else reply

    async def publish(self, version: int, **more: Any) -> tuple[int, Any]:
        body = {"version": version, "store": "job.store", **more}
        return await self.post("/v1/jobs/job/versions", body)

    async def status(self) -> Any:
        return (await self.get("/v1/status"))[1]

    async def close(self) -> None:
        await self._session.close()
        await self._site.close()
        await self.scheduler.close()
        for site in self.sites:
            await site.close()


@asynccontextmanager
async def gateway_on(
    *engines: FakeEngine | str,
    tokens: Path | None = None,
    tls: ServerTls | None = None,
    state: Path | None = None,
    watch: Callable[[web.Application], None] = lambda _: None,
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncIterator[GatewayInProcess]:
    """Engines are `e0`, `e1`, ... in the order given, a URL is one that runs; the job is `job`.

    `tokens`: the tenants' file; without it every client is trusted. `state`: the state file.
    `watch` is called with the application before it is served. `clock`: the gateway's, for times of
    which a test says when they are over.
    """
    sites, urls = [], []
    for engine in engines:
        if isinstance(engine, FakeEngine):
            sites.append(Site())
            await sites[-1].serve(engine.app())
        urls.append(sites[-1].url if isinstance(engine, FakeEngine) else engine)
    listed = [{"id": f"e{at}", "url": url, "concurrency": 8} for at, url in enumerate(urls)]
    given = {"port": 0, "engines": listed, "jobs": [{"id": "job"}], **settings}
    given["timeouts"] = {**PATIENT, "health_s": 0.05, **given.get("timeouts", {})}
    parsed, clock = GatewaySettings.model_validate(given), clock or MonotonicClock()
    async with aiohttp.ClientSession() as session:
        scheduler = Scheduler(parsed, clock, SchedulerState(state), session)
        await scheduler.start()
        site, service = Site(tls), Gateway(scheduler, parsed, Tenants.load(tokens), clock)
        watch(service.app)
        await site.serve(service.app)
        gateway = GatewayInProcess(scheduler, service, site, sites)
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
