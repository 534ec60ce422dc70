"""The gateway's HTTP routes. Decodes, authenticates, and hands over to the scheduler.

Its own routes are here, those of clients of vLLM, OpenAI, SGLang, Tinker and of trainers' engines
among the dialects; /jobs/{job} has all of them again, for one job (job_paths.py).
"""

import logging
import resource
from contextlib import ExitStack, suppress
from functools import cache, partial
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from harvester.contracts.clock import Clock
from harvester.contracts.errors import UNDECODABLE, PeerProtocolError
from harvester.contracts.ids import JobId, WeightVersion, checked_name
from harvester.contracts.wire.gateway_status import GatewayStatus
from harvester.contracts.wire.leases import JOB_HEADER
from harvester.contracts.wire.rollouts import GENERATE_ROUTE, AnnouncedVersion, VersionSwitched
from harvester.contracts.wire.stops import ClusterStopReply, StopRequest
from harvester.platform.http_kit import (
    COUNT_READ,
    RETRY_AFTER,
    SMALL_BODY_BYTES,
    decoded_body,
    error_reply,
    errors_as_replies,
    json_reply,
    whole_body,
)
from harvester.platform.keep_alive import keep_alive
from harvester.platform.openapi_document import serve_routes
from harvester.platform.route_table import Callers, Route, metrics_route, routes_of
from harvester.platform.tenant_shares import Pressure, TenantShares
from harvester.platform.tenants import OPERATOR, Tenants
from scheduler.gateway.abort_routes import AbortRoutes
from scheduler.gateway.dialects.engine_list_routes import EngineListRoutes
from scheduler.gateway.dialects.generate_routes import GenerateRoutes
from scheduler.gateway.dialects.renderer import RendererFault, RenderRefused
from scheduler.gateway.dialects.sglang_routes import SglangRoutes
from scheduler.gateway.dialects.text_routes import OPENAI_ROUTES, TextRoutes
from scheduler.gateway.dialects.tinker_routes import TinkerRoutes
from scheduler.gateway.dialects.weight_sync import WeightSyncRoutes
from scheduler.gateway.engines.engine_faults import RequestRefused
from scheduler.gateway.gateway_status import render_metrics, status_of
from scheduler.gateway.job_paths import (
    JOB_BASE,
    JOB_OF_MODEL,
    SHOWN_CHARS,
    job_named,
    job_of_model,
    route_of,
)
from scheduler.gateway.job_switches import JobSwitch, SwitchRequest
from scheduler.gateway.job_turns import IdInUse, TurnRefused
from scheduler.gateway.loop_share import LoopEntry
from scheduler.gateway.openapi import NEW_VERSION, RETRIED, SHOWN
from scheduler.gateway.policy.versions_events import VersionPublished
from scheduler.gateway.pressure import HELD_BODY, check_values, connection_room
from scheduler.gateway.scheduler import Scheduler
from scheduler.gateway.settings import GatewaySettings

_log = logging.getLogger(__name__)
_tell_once = cache(_log.warning)
_ENCODER = msgspec.json.Encoder()


def _with_error_object(response: web.StreamResponse, route: str) -> web.StreamResponse:
    """The error as an object, with the type that OpenAI or vLLM names in this dialect."""
    if response.status < 400 or not isinstance(response, web.Response):
        return response
    body = response.body
    if not isinstance(body, bytes | bytearray):
        return response
    message = msgspec.json.decode(body)["error"]
    if not isinstance(message, str):
        return response
    if route == GENERATE_ROUTE:
        kind = HTTPStatus(response.status).phrase.replace(" ", "").removesuffix("Error") + "Error"
    else:
        kind = "invalid_request_error" if response.status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": response.status}
    response.body = msgspec.json.encode({"error": error})
    return response


@web.middleware
async def dialect_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    route = route_of(request)
    try:
        response = await handler(request)
    except RenderRefused as error:
        response = error_reply(error.status, str(error))
        with suppress(*UNDECODABLE):
            msgspec.json.decode(error.body, type=dict)
            response.body = error.body
            return response
    if response.status == PRESSURE_STATUS:
        response.headers["Retry-After"] = _PRESSURE_RETRY_AFTER
        response.force_close()
        if route in OPENAI_ROUTES:
            response.set_status(OPENAI_PRESSURE_STATUS)
    return _with_error_object(response, route) if route in _ERROR_OBJECTS else response


PRESSURE_STATUS, OPENAI_PRESSURE_STATUS = 429, 503
"""Statuses of refusals for overload: 429 on every route but OpenAI's, where it is 503.

TRL retries 503 and never 429, OpenAI's SDK both; slime, miles and AReaL retry any status, and
SGLang's own gateway answers 429 when its queue is full.
"""
_PRESSURE_RETRY_AFTER = "10"
"""Seconds: a queue of thousands does not empty in one, and TRL retries only three times."""
_STATUSES = {
    RequestRefused: 400,
    IdInUse: 409,
    TurnRefused: None,
    RendererFault: None,
    Pressure: PRESSURE_STATUS,
    web.HTTPException: None,
}
_ERROR_OBJECTS = OPENAI_ROUTES | {GENERATE_ROUTE}

_probe = partial(Route, refuses=(503,), callers=Callers.ANYONE)


class Gateway:
    def __init__(
        self, scheduler: Scheduler, settings: GatewaySettings, tenants: Tenants, clock: Clock
    ) -> None:
        self._scheduler = scheduler
        self._tenants = tenants
        self._clock = clock
        self._open = False
        self._generate = generate = GenerateRoutes(scheduler)
        self._entry = LoopEntry()
        self._max_body_bytes = settings.max_body_bytes
        self.open_bodies = TenantShares(settings.max_open_bytes, name="max_open_bytes")
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        places = sum(each.concurrency for each in settings.engines)
        self._room = connection_room(descriptors, places=places)
        self._connections = TenantShares(self._room, name="room for connections (ulimit -n)")
        if self._room < (most := settings.routing_config.queue_turns):
            line = "queue_turns is %d, and descriptors (ulimit -n) leave room for %d requests"
            _log.warning(line, most, self._room)
        self.app = web.Application(
            middlewares=[
                dialect_errors,
                errors_as_replies(_STATUSES, try_later=RETRIED),
                self._bound_bodies,
            ],
            client_max_size=settings.max_body_bytes,
        )
        routes = routes_of(
            generate,
            self,
            WeightSyncRoutes(scheduler),
            TextRoutes(scheduler, generate.admitted),
            AbortRoutes(scheduler),
            SglangRoutes(scheduler, generate.admitted),
            EngineListRoutes(scheduler, self._activated),
            TinkerRoutes(scheduler, generate.admitted, self.open_bodies),
        )
        metrics = partial(render_metrics, scheduler)
        routes.append(metrics_route(metrics, callers=Callers.OBSERVERS))
        self._prompts = frozenset(each.path for each in routes if each.body_bytes is None)
        """Routes whose bodies are prompts: all that are open at once are counted."""
        serve_routes(
            self.app,
            "gateway",
            routes,
            bases=("", JOB_BASE),
            admit=self._arguments,
            readers=Callers.ANYONE,
            **SHOWN,
        )

    def open(self) -> None:
        """The scheduler knows what the process before it left: turns may come."""
        self._open = True

    def close(self) -> None:
        self._generate.closing = True

    @web.middleware
    async def _bound_bodies(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if route_of(request) not in self._prompts:
            return await handler(request)
        keep_alive(request.get_extra_info("socket"))
        await self._entry.enter()
        jobs, possible = self._scheduler.jobs, self._possible_jobs(request)
        tenants = {jobs[job].tenant for job in possible}
        # The body may name one of several jobs.
        tenant = tenants.pop() if len(tenants) == 1 else OPERATOR
        if self._connections.held >= self._room:
            _tell_once("no room for connections beside %d requests: raise ulimit -n", self._room)
        with self._connections.holding(tenant, 1), ExitStack() as held:
            count = self.open_bodies.counter(tenant, held, most=self._max_body_bytes)
            if request.content_length is None:
                request[COUNT_READ] = count
            else:
                count(request.content_length)
            request[HELD_BODY] = held
            body = await whole_body(request)
            await check_values(body)
            if len(possible) > 1:
                adapters = filter(None, (job.adapter for job in jobs.values()))
                models = {*self._scheduler.registry.models(), *adapters}
                if (job := job_of_model(body, possible, models)) is not None:
                    request[JOB_OF_MODEL] = job
            return await handler(request)

    @Route("POST /v1/jobs/{job}/versions", "A version was published", refuses=NEW_VERSION)
    async def _publish(self, job: JobId, body: AnnouncedVersion) -> VersionSwitched:
        engines = await self._scheduler.versions.publish(
            VersionPublished(
                job=job,
                store=checked_name(body.store, what="store"),
                version=body.version,
                state_hash=body.state_hash,
                cut_exact=body.cut_open_turns,
            )
        )
        active = self._scheduler.versions.is_active(job)
        return VersionSwitched(version=body.version, engines=engines, active=active)

    @Route(
        "POST /v1/jobs/{job}/activate",
        "Serve this job from now on",
        refuses=(*NEW_VERSION, 408, 413),
    )
    async def _activate(self, job: JobId, request: web.Request) -> VersionSwitched:
        await decoded_body(request, Any, most_bytes=SMALL_BODY_BYTES, empty=b"{}")
        return await self._activated(job, request)

    async def _activated(self, job: JobId, request: web.Request) -> VersionSwitched:
        check = partial(self._check_displaced, self._tenant(request))
        version, engines = await self._scheduler.versions.activate(job, check=check)
        return VersionSwitched(version=WeightVersion(version), engines=engines)

    def _check_displaced(self, tenant: str | None) -> None:
        """Raises HTTPConflict where an activation takes engines from another tenant's turns."""
        scheduler, target = self._scheduler, self._scheduler.fleet.policy.target
        if tenant is None or target is None or scheduler.jobs[target.job].tenant == tenant:
            return
        routing = scheduler.dispatcher.policy
        uses = routing.uses_engines(target.job)
        if not scheduler.registry.may_use_dedicated(target.job):
            # Queued turns wait for leases and do not count; turns on leased engines would be cut.
            uses = bool(routing.open_turns_of(target.job))
        if uses:
            raise web.HTTPConflict(
                reason="another tenant's job is served and has open turns; try again when they "
                "have ended, or let the operator activate"
            )

    @Route("POST /v1/jobs/{job}/harvesting", "Whether it leases slots", refuses=(503,))
    @Route("POST /v1/jobs/{job}/dedicated", "Whether it uses dedicated engines", refuses=(503,))
    async def _switch(
        self, job: JobId, request: web.Request, body: SwitchRequest
    ) -> dict[str, Any]:
        switch = JobSwitch(request.path.rpartition("/")[2])
        if body.for_s is not None and not body.enabled:
            raise PeerProtocolError("for_s: send it with enabled: true alone")
        recorded = self._scheduler.switches.set(job, switch, on=body.enabled, for_s=body.for_s)
        reply = {"job": job, switch.value: body.enabled}
        return reply if recorded else reply | {"recorded": False}

    @Route(
        "POST /v1/stops",
        "Hold, drain or resume the cluster",
        refuses=(503,),
        callers=Callers.OPERATOR,
    )
    async def _stop(self, body: StopRequest) -> ClusterStopReply:
        reply = await self._scheduler.stops.order(body)
        self._scheduler.wake.set()
        jobs = self._scheduler.registry.jobs
        return msgspec.structs.replace(
            reply,
            reached=tuple(job for job, given in jobs.items() if body.tenant in ("", given.tenant)),
            tenants=tuple(sorted({given.tenant for given in jobs.values()})),
            left=self._scheduler.stops.stops,
        )

    @Route("GET /v1/status", "Engines, jobs, queue, leases and counters", callers=Callers.READERS)
    async def _status(self, tenant: str | None) -> GatewayStatus:
        return status_of(self._scheduler, now=self._clock.now(), tenant=tenant)

    @_probe("GET /healthz", "200, or 503 while it shuts down")
    async def _healthz(self) -> web.Response:
        if self._generate.closing:
            return error_reply(503, "shutting down", headers=RETRY_AFTER)
        return json_reply({"status": "ok"})

    @_probe("GET /readyz", "200 while it takes turns, else 503")
    async def _readyz(self) -> web.Response:
        if not self._open and not self._generate.closing:
            return error_reply(503, "starting", headers=RETRY_AFTER)
        return await self._healthz()

    def _arguments(self, request: web.Request, route: Route) -> dict[str, Any]:
        """The job of a call that tenants may make, and the tenant of another one with a token."""
        if route.callers is Callers.TENANTS:
            return {"job": self._job(request)}
        known = route.callers is not Callers.ANYONE
        return {"tenant": self._tenant(request, route.callers)} if known else {}

    def _job(self, request: web.Request) -> JobId:
        """The job that is meant, if the caller may speak for it."""
        possible = self._possible_jobs(request)
        if len(possible) != 1:
            names = f"several jobs: {', '.join(possible)[:SHOWN_CHARS]}" if possible else "no job"
            raise PeerProtocolError(
                f"send the header {JOB_HEADER}, use /jobs/NAME as the base path, or sample from "
                f"the job's name as `model`: this caller has {names}"
            )
        return possible[0]

    def _possible_jobs(self, request: web.Request) -> list[JobId]:
        """The job that the request names, else all that the caller may speak for."""
        tenant, job, jobs = self._tenant(request), job_named(request), self._scheduler.jobs
        own = [name for name in jobs if tenant in (None, jobs[name].tenant)]
        if job is None:
            return own
        if job not in own:
            raise PeerProtocolError(f"job {job} is not configured for this caller")
        return [job]

    def _tenant(self, request: web.Request, callers: Callers = Callers.TENANTS) -> str | None:
        """The caller; None: the operator, and everyone without tokens."""
        key = f"Bearer {request.headers.get('X-API-Key', '')}"  # Tinker's client sends this header.
        return self._tenants.caller(request.headers.get("Authorization", key), callers)
