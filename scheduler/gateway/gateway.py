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

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted, PeerProtocolError, Stale
from harvester.contracts.ids import JobId, WeightVersion, checked_name
from harvester.contracts.wire.leases import JOB_HEADER
from harvester.contracts.wire.rollouts import (
    GenerateReply,
    GenerateRequest,
    PublishedVersion,
    VersionSwitched,
)
from scheduler.gateway.config import GatewaySettings
from scheduler.gateway.engine import RequestRefused
from scheduler.gateway.open_turns import IdInUse
from scheduler.gateway.policy.routing_events import (
    Refusal,
)
from scheduler.gateway.renderer import RenderRefused
from scheduler.gateway.requests import decode_generate
from scheduler.gateway.samples import Samples, TurnRefused, follow, samples_of
from scheduler.gateway.scheduler import Scheduler
from scheduler.gateway.sglang_routes import SglangRoutes
from scheduler.gateway.status import render_metrics, status
from scheduler.gateway.tenants import Tenants
from scheduler.gateway.text_routes import (
    OPENAI_ROUTES,
    TextRoutes,
    event_stream,
    trajectory_of,
    wants_usage,
)
from scheduler.gateway.weight_sync import WeightSyncRoutes

_ENCODER = msgspec.json.Encoder()
_RETRY_AFTER_S = "1"
_REFUSED_STATUS = {
    Refusal.VERSION: 409,
    Refusal.REQUEST: 422,
    Refusal.CONTEXT: 400,
    Refusal.JOB: 503,
    Refusal.FULL: 503,
}
_SMALL_BODY_BYTES = 64 << 10
FOR_MAX_S = 3600.0
_MODEL_CHARS = 200

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Enabled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: bool
    for_s: Annotated[float, msgspec.Meta(gt=0.0, le=FOR_MAX_S)] | None = None
    """Switched off after this long unless renewed, in s; None: it stays."""

    def checked(self) -> "_Enabled":
        if self.for_s is not None and not self.enabled:
            raise PeerProtocolError("for_s: goes with enabled: true")
        return self


def _error(status_code: int, message: str) -> web.Response:
    headers = {"Retry-After": _RETRY_AFTER_S} if status_code in (409, 503) else None
    return web.Response(
        status=status_code,
        body=_ENCODER.encode({"error": message}),
        content_type="application/json",
        headers=headers,
    )


def _reply(body: object) -> web.Response:
    return web.Response(body=_ENCODER.encode(body), content_type="application/json")


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
    response.body = _ENCODER.encode({"error": error})
    return response


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await handler(request)
    return _as_openai(response) if request.path in OPENAI_ROUTES else response


@web.middleware
async def errors_as_replies(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (PeerProtocolError, RequestRefused) as error:
        return _error(400, str(error))
    except RenderRefused as error:
        return web.Response(status=error.status, body=error.body, content_type="application/json")
    except TurnRefused as error:
        return _error(_REFUSED_STATUS[error.refusal], str(error))
    except (Stale, IdInUse) as error:
        return _error(409, str(error))
    except Exhausted as error:
        return _error(503, str(error))
    except web.HTTPException as error:
        return _error(error.status, error.reason)


class Gateway:
    def __init__(
        self, scheduler: Scheduler, settings: GatewaySettings, tenants: Tenants, clock: Clock
    ) -> None:
        self._scheduler = scheduler
        self._tenants = tenants
        self._clock = clock
        self._closing = False
        self.app = web.Application(
            middlewares=[openai_errors, errors_as_replies], client_max_size=settings.max_body_bytes
        )
        self.app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/v1/jobs/{job}/versions", self._publish),
                web.post("/v1/jobs/{job}/activate", self._activate),
                web.post("/v1/jobs/{job}/harvesting", self._harvesting),
                web.post("/v1/jobs/{job}/dedicated", self._dedicated),
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
            return _reply(
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
        asked = decode_generate(body, vocabulary_tokens=vocabulary_tokens)
        names = self._scheduler.model_names(job)
        if asked.model is not None and asked.model not in names:
            raise PeerProtocolError(
                f"model: {asked.model[:_MODEL_CHARS]!r} is not what job {job} trains; "
                f"leave it out or name {' or '.join(sorted(names))}"
            )
        return asked

    async def _publish(self, request: web.Request) -> web.Response:
        job = self._job(request, request.match_info["job"])
        published = await _decoded(request, PublishedVersion)
        if published.version < 1:
            raise PeerProtocolError("version: versions begin at 1")
        engines = await self._scheduler.publish(
            job,
            store=checked_name(published.store, what="store"),
            version=published.version,
            cut_exact=published.cut_open_turns,
        )
        return _reply(VersionSwitched(version=published.version, engines=engines))

    async def _activate(self, request: web.Request) -> web.Response:
        job = self._job(request, request.match_info["job"])
        version, engines = await self._scheduler.activate(job)
        return _reply(VersionSwitched(version=WeightVersion(version), engines=engines))

    async def _harvesting(self, request: web.Request) -> web.Response:
        job = self._job(request, request.match_info["job"])
        wanted = (await _decoded(request, _Enabled)).checked()
        self._scheduler.set_harvesting(job, enabled=wanted.enabled, for_s=wanted.for_s)
        return _reply({"job": job, "harvesting": wanted.enabled})

    async def _dedicated(self, request: web.Request) -> web.Response:
        job = self._job(request, request.match_info["job"])
        wanted = (await _decoded(request, _Enabled)).checked()
        self._scheduler.use_dedicated(job, enabled=wanted.enabled, for_s=wanted.for_s)
        return _reply({"job": job, "dedicated": wanted.enabled})

    async def _status(self, request: web.Request) -> web.Response:
        self._tenant(request)
        return _reply(status(self._scheduler, now=self._clock.now()))

    async def _metrics(self, request: web.Request) -> web.Response:
        self._tenant(request)
        return web.Response(
            body=render_metrics(self._scheduler),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _error(503, "shutting down") if self._closing else _reply({"status": "ok"})

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
    request: web.Request, asked: GenerateRequest, samples: Samples
) -> web.StreamResponse:
    """The choices' tokens as server-sent events, as fast as the client reads."""
    reply = GenerateReply(request_id=asked.request_id, choices=())
    async with event_stream(request) as send:
        async for choice in samples.chunks():
            await send(msgspec.structs.replace(reply, choices=(choice,)))
        if wants_usage(asked.stream_options):
            await send(msgspec.structs.replace(reply, usage=samples.usage()))
    return send.response


async def _decoded(request: web.Request, kind: type[T]) -> T:
    if (request.content_length or 0) > _SMALL_BODY_BYTES:
        raise PeerProtocolError(f"body of more than {_SMALL_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.MsgspecError as error:
        raise PeerProtocolError(str(error)) from error
