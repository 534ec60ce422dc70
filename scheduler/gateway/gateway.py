"""The gateway's HTTP routes. Decodes, authenticates, and hands over to the scheduler.

Its own routes are here, those of clients of vLLM, OpenAI, SGLang, Tinker and of trainers' engines
beside the dialects; /jobs/{job} has all of them again, for one job (job_paths.py).
"""

import logging
import resource
import secrets
from contextlib import ExitStack, suppress
from functools import cache, partial
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from harvester.contracts.clock import Clock
from harvester.contracts.errors import UNDECODABLE, Exhausted, PeerProtocolError
from harvester.contracts.ids import JobId, WeightVersion, checked_name
from harvester.contracts.wire.gateway_status import GatewayStatus
from harvester.contracts.wire.leases import JOB_HEADER
from harvester.contracts.wire.rollouts import (
    GENERATE_ROUTE,
    AnnouncedVersion,
    GenerateReply,
    GenerateRequest,
    VersionSwitched,
)
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
from harvester.platform.openapi_document import serve_routes
from harvester.platform.route_table import Callers, Route, metrics_route, routes_of
from harvester.platform.tenant_shares import Pressure, TenantShares
from harvester.platform.tenants import OPERATOR, Tenants
from scheduler.gateway.abort_routes import AbortRoutes
from scheduler.gateway.dialects.engine_list_routes import EngineListRoutes
from scheduler.gateway.dialects.event_stream import event_stream
from scheduler.gateway.dialects.renderer import RendererFault, RenderRefused
from scheduler.gateway.dialects.session_names import trajectory_of
from scheduler.gateway.dialects.sglang_routes import SglangRoutes
from scheduler.gateway.dialects.text_logprobs import NAMED_AT_ONCE, named, named_in_parts
from scheduler.gateway.dialects.text_routes import OPENAI_ROUTES, TextRoutes, wants_usage
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
from scheduler.gateway.loop_share import LoopEntry, LoopShare
from scheduler.gateway.openapi import NEW_VERSION, RETRIED, SAMPLES, SHOWN, TURN
from scheduler.gateway.policy.turn import SHUTTING_DOWN
from scheduler.gateway.policy.versions_events import VersionPublished
from scheduler.gateway.pressure import HELD_BODY, connection_room
from scheduler.gateway.requests import decode_generate
from scheduler.gateway.samples import Samples, follow, samples_of
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
"""In s: a queue of thousands does not empty in one, and TRL tries again three times only."""
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
        self._open = self._closing = False
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
            self,
            WeightSyncRoutes(scheduler),
            TextRoutes(scheduler, self._admitted),
            AbortRoutes(scheduler),
            SglangRoutes(scheduler, self._admitted),
            EngineListRoutes(scheduler, self._activated),
            TinkerRoutes(scheduler, self._admitted, self.open_bodies),
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
        self._closing = True

    @web.middleware
    async def _bound_bodies(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if route_of(request) not in self._prompts:
            return await handler(request)
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
            if len(possible) > 1:
                body = await whole_body(request)
                adapters = filter(None, (job.adapter for job in jobs.values()))
                models = {*self._scheduler.registry.models(), *adapters}
                if (job := job_of_model(body, possible, models)) is not None:
                    request[JOB_OF_MODEL] = job
            return await handler(request)

    @Route(
        f"POST {GENERATE_ROUTE}",
        "One turn, token ids in and out",
        GenerateRequest,
        GenerateReply,
        refuses=SAMPLES,
        **TURN,
    )
    async def _generate(self, job: JobId, request: web.Request) -> web.StreamResponse:
        checked = self._checked(job, await whole_body(request))
        asked, can_ask_again = _with_id(checked), bool(checked.request_id)
        trajectory = trajectory_of(request, asked.request_id)
        parts, name = samples_of(asked), asked.request_id
        async with follow(
            self._scheduler.turns[job], trajectory, parts, name=name, named=can_ask_again
        ) as samples:
            if asked.stream:
                return await _streamed(request, asked, samples)
            turns = await samples.results()
            share, choices = LoopShare(), list[Any]()
            for index, turn in enumerate(turns):
                choice = await named_in_parts(msgspec.structs.replace(turn.choice(), index=index))
                # Thousands of them would be encoded at once.
                choices.append(msgspec.Raw(_ENCODER.encode(choice)) if len(turns) > 1 else choice)
                await share.rest()
            return json_reply(
                GenerateReply(
                    request_id=asked.request_id,
                    choices=tuple(choices),
                    model=asked.model or job,
                    usage=samples.usage(),
                    **_of_prompt(asked, samples) | samples.versions(),
                )
            )

    def _admitted(self, job: JobId, body: bytes) -> GenerateRequest:
        return _with_id(self._checked(job, body))

    def _checked(self, job: JobId, body: bytes) -> GenerateRequest:
        """Raises Exhausted at the end of the gateway, PeerProtocolError."""
        if self._closing:
            raise Exhausted(SHUTTING_DOWN)
        registry = self._scheduler.registry
        turn_request = decode_generate(
            body,
            vocabulary_tokens=registry.vocabulary_tokens(),
            context_tokens=registry.context_tokens(),
        )
        self._check_model(job, turn_request.model)
        return turn_request

    def _check_model(self, job: JobId, model: str | None) -> None:
        """Raises HTTPNotFound, as vLLM does, and Exhausted where an engine that has never been up
        or offered may have the model."""
        names = self._scheduler.registry.model_names(job)
        if model is None or model in names:
            return
        trains = "the adapter that" if self._scheduler.jobs[job].adapter else "what"
        why = f"model: {model[:SHOWN_CHARS]!r} is not {trains} job {job} trains; "
        if self._scheduler.registry.may_meet_other_models(job):
            raise Exhausted(f"{why}and no engine's model is known yet")
        raise web.HTTPNotFound(reason=f"{why}leave it out or name {' or '.join(sorted(names))}")

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
        return reply

    @Route("GET /v1/status", "Engines, jobs, queue, leases and counters", callers=Callers.READERS)
    async def _status(self, tenant: str | None) -> GatewayStatus:
        return status_of(self._scheduler, now=self._clock.now(), tenant=tenant)

    @_probe("GET /healthz", "200, or 503 while it shuts down")
    async def _healthz(self) -> web.Response:
        if self._closing:
            return error_reply(503, "shutting down", headers=RETRY_AFTER)
        return json_reply({"status": "ok"})

    @_probe("GET /readyz", "200 while it takes turns, else 503")
    async def _readyz(self) -> web.Response:
        if not self._open and not self._closing:
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


def _with_id(asked: GenerateRequest) -> GenerateRequest:
    if asked.request_id:
        return asked
    return msgspec.structs.replace(asked, request_id=secrets.token_hex(16))


async def _streamed(
    request: web.Request, turn_request: GenerateRequest, samples: Samples
) -> web.StreamResponse:
    """The choices' tokens as server-sent events, as fast as the client reads."""
    reply = GenerateReply(request_id=turn_request.request_id, choices=())
    options, unsent = turn_request.stream_options, True
    async with event_stream(request) as send:
        async for choice in samples.chunks():
            more: dict[str, Any] = {}
            if choice.finish_reason is not None:
                more |= samples.versions(choice.index)
            if unsent and choice.index == 0:
                more |= _of_prompt(turn_request, samples)
                unsent = False
            if wants_usage(options, "include_usage", "continuous_usage_stats"):
                more["usage"] = samples.usage(choice.index)
            short = len(choice.token_ids) <= NAMED_AT_ONCE
            named_choice = named(choice) if short else await named_in_parts(choice)
            await send(msgspec.structs.replace(reply, choices=(named_choice,), **more))
        if wants_usage(options):
            await send(msgspec.structs.replace(reply, usage=samples.usage()))
    return send.response


def _of_prompt(asked: GenerateRequest, samples: Samples) -> dict[str, Any]:
    """The reply's fields about the prompt, in a stream with the first choice's first event."""
    scores = samples.prompt_scores(0)
    return scores | ({"prompt_token_ids": asked.token_ids} if asked.return_token_ids else {})
