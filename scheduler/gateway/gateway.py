"""The gateway's HTTP routes. Decodes, authenticates, and hands over to the scheduler.

POST /inference/v1/generate             one turn; JSON, or SSE with "stream": true
POST /v1/jobs/{job}/versions            a version was published
POST /v1/jobs/{job}/activate            the engines serve this job from now on
POST /v1/jobs/{job}/harvesting          {"enabled": bool, "for_s": float?}
POST /v1/jobs/{job}/dedicated           {"enabled": bool, "for_s": float?}
/v1/jobs/{job}/vllm/...                 the job's engines as one vLLM server (weight_sync.py)
/v1/chat/completions, ...               OpenAI's routes (text_routes.py)
/generate, ...                          SGLang's (sglang_routes.py)
GET  /v1/status   GET /metrics   GET /healthz
"""

from functools import partial
from typing import Annotated

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.ids import JobId, WeightVersion, checked_name
from harvester.contracts.wire.leases import JOB_HEADER
from harvester.contracts.wire.rollouts import (
    GenerateReply,
    GenerateRequest,
    PublishedVersion,
    VersionSwitched,
)
from harvester.platform.http_kit import (
    RETRY_AFTER,
    SMALL_BODY_BYTES,
    decoded_body,
    error_reply,
    errors_as_replies,
    json_reply,
)
from scheduler.gateway.engine_client import RequestRefused
from scheduler.gateway.gateway_status import render_metrics, status
from scheduler.gateway.open_turns import IdInUse
from scheduler.gateway.renderer import RenderRefused
from scheduler.gateway.requests import decode_generate
from scheduler.gateway.samples import Samples, TurnRefused, follow, samples_of
from scheduler.gateway.scheduler import Scheduler, Switch
from scheduler.gateway.settings import GatewaySettings
from scheduler.gateway.sglang_routes import SglangRoutes
from scheduler.gateway.tenants import Tenants
from scheduler.gateway.text_routes import (
    OPENAI_ROUTES,
    TextRoutes,
    event_stream,
    trajectory_of,
    wants_usage,
)
from scheduler.gateway.weight_sync import WeightSyncRoutes

FOR_MAX_S = 3600.0
_MODEL_CHARS = 200


class _Enabled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: bool
    for_s: Annotated[float, msgspec.Meta(gt=0.0, le=FOR_MAX_S)] | None = None
    """Switched off after this long unless renewed, in s; None: it stays."""


def _as_openai(response: web.StreamResponse) -> web.StreamResponse:
    """The error as OpenAI's clients read it."""
    if response.status < 400 or not isinstance(response, web.Response):
        return response
    body = response.body
    if not isinstance(body, bytes | bytearray):
        return response
    told = msgspec.json.decode(body)["error"]
    if not isinstance(told, str):
        return response
    kind = "invalid_request_error" if response.status < 500 else "server_error"
    error = {"message": told, "type": kind, "param": None, "code": response.status}
    response.body = msgspec.json.encode({"error": error})
    return response


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except RenderRefused as error:
        return web.Response(status=error.status, body=error.body, content_type="application/json")
    return _as_openai(response) if request.path in OPENAI_ROUTES else response


_STATUSES = {RequestRefused: 400, IdInUse: 409, TurnRefused: None, web.HTTPException: None}


class Gateway:
    def __init__(
        self, scheduler: Scheduler, settings: GatewaySettings, tenants: Tenants, clock: Clock
    ) -> None:
        self._scheduler = scheduler
        self._tenants = tenants
        self._clock = clock
        self._closing = False
        self.app = web.Application(
            middlewares=[openai_errors, errors_as_replies(_STATUSES, try_later=(409, 503))],
            client_max_size=settings.max_body_bytes,
        )
        self.app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/v1/jobs/{job}/versions", self._publish),
                web.post("/v1/jobs/{job}/activate", self._activate),
                *(
                    web.post(f"/v1/jobs/{{job}}/{switch}", partial(self._switch, switch))
                    for switch in Switch
                ),
                *WeightSyncRoutes(scheduler, self._job_of_path).routes(),
                *TextRoutes(scheduler, self._job_of_header, self._admitted).routes(),
                *SglangRoutes(scheduler, self._job_of_header, self._admitted).routes(),
                web.get("/v1/status", self._status),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
            ]
        )

    def close(self) -> None:
        self._closing = True

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        job = self._job_of_header(request)
        asked = self._admitted(job, await request.read())
        trajectory = trajectory_of(request, asked.request_id)
        async with follow(self._scheduler, job, trajectory, samples_of(asked)) as samples:
            if asked.stream:
                return await _streamed(request, asked, samples)
            turns = await samples.results()
            choices = tuple(
                msgspec.structs.replace(turn.choice(), index=index)
                for index, turn in enumerate(turns)
            )
            return json_reply(
                GenerateReply(
                    request_id=asked.request_id,
                    choices=choices,
                    model=asked.model or job,
                    usage=samples.usage(),
                    prompt_token_ids=asked.token_ids if asked.return_token_ids else None,
                )
            )

    def _admitted(self, job: JobId, body: bytes) -> GenerateRequest:
        """Raises Exhausted at the end of the gateway, PeerProtocolError."""
        if self._closing:
            raise Exhausted("the gateway is shutting down")
        vocabulary_tokens = self._scheduler.fleet.vocabulary_tokens()
        turn_request = decode_generate(body, vocabulary_tokens=vocabulary_tokens)
        names = self._scheduler.model_names(job)
        if turn_request.model is not None and turn_request.model not in names:
            raise PeerProtocolError(
                f"model: {turn_request.model[:_MODEL_CHARS]!r} is not what job {job} trains; "
                f"leave it out or name {' or '.join(sorted(names))}"
            )
        return turn_request

    async def _publish(self, request: web.Request) -> web.Response:
        job = self._job_of_path(request)
        published = await decoded_body(request, PublishedVersion, most_bytes=SMALL_BODY_BYTES)
        if published.version < 1:
            raise PeerProtocolError("version: versions begin at 1")
        engines = await self._scheduler.publish(
            job,
            store=checked_name(published.store, what="store"),
            version=published.version,
            cut_exact=published.cut_open_turns,
        )
        return json_reply(VersionSwitched(version=published.version, engines=engines))

    async def _activate(self, request: web.Request) -> web.Response:
        job = self._job_of_path(request)
        version, engines = await self._scheduler.activate(job)
        return json_reply(VersionSwitched(version=WeightVersion(version), engines=engines))

    async def _switch(self, switch: Switch, request: web.Request) -> web.Response:
        job = self._job_of_path(request)
        wanted = await decoded_body(request, _Enabled, most_bytes=SMALL_BODY_BYTES)
        if wanted.for_s is not None and not wanted.enabled:
            raise PeerProtocolError("for_s: goes with enabled: true")
        self._scheduler.switch(job, switch, enabled=wanted.enabled, for_s=wanted.for_s)
        return json_reply({"job": job, switch.value: wanted.enabled})

    async def _status(self, request: web.Request) -> web.Response:
        self._tenant(request)
        return json_reply(status(self._scheduler, now=self._clock.now()))

    async def _metrics(self, request: web.Request) -> web.Response:
        self._tenant(request)
        return web.Response(
            body=render_metrics(self._scheduler),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _healthz(self, _request: web.Request) -> web.Response:
        if self._closing:
            return error_reply(503, "shutting down", headers=RETRY_AFTER)
        return json_reply({"status": "ok"})

    def _job_of_header(self, request: web.Request) -> JobId:
        return self._job(request, request.headers.get(JOB_HEADER))

    def _job_of_path(self, request: web.Request) -> JobId:
        return self._job(request, request.match_info["job"])

    def _job(self, request: web.Request, given: str | None) -> JobId:
        """The job that is meant, if the caller may speak for it."""
        tenant = self._tenant(request)
        jobs = self._scheduler.jobs
        if given is None:
            if len(jobs) != 1:
                raise PeerProtocolError(f"send the header {JOB_HEADER}: there are several jobs")
            job = next(iter(jobs))
        else:
            job = JobId(checked_name(given, what="job"))
        if job not in jobs or (tenant is not None and jobs[job].tenant != tenant):
            raise PeerProtocolError(f"job {job} is not configured for this caller")
        return job

    def _tenant(self, request: web.Request) -> str | None:
        if self._tenants.open_to_all:
            return None
        tenant = self._tenants.tenant_of(request.headers.get("Authorization", ""))
        if tenant is None:
            raise web.HTTPUnauthorized(reason="send Authorization: Bearer <tenant's token>")
        return tenant


async def _streamed(
    request: web.Request, turn_request: GenerateRequest, samples: Samples
) -> web.StreamResponse:
    """The choices' tokens as server-sent events, as fast as the client reads."""
    reply = GenerateReply(request_id=turn_request.request_id, choices=())
    async with event_stream(request) as send:
        async for choice in samples.chunks():
            await send(msgspec.structs.replace(reply, choices=(choice,)))
        if wants_usage(turn_request.stream_options):
            await send(msgspec.structs.replace(reply, usage=samples.usage()))
    return send.response
