"""The gateway's HTTP routes. Decodes, authenticates, and hands over to the scheduler.

POST /inference/v1/generate             one turn; JSON, or SSE with "stream": true
POST /v1/jobs/{job}/versions            a version was published
POST /v1/jobs/{job}/activate            the engines serve this job from now on
POST /v1/jobs/{job}/harvesting          {"enabled": bool, "for_s": float?}
POST /v1/jobs/{job}/dedicated           {"enabled": bool, "for_s": float?}
/v1/jobs/{job}/vllm/...                 the job's engines as one vLLM server (weight_sync.py)
GET  /v1/status   GET /metrics   GET /healthz
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from aiohttp import web

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted, PeerProtocolError, RoseMuxError
from harvester.contracts.ids import JobId, WeightVersion, checked_name
from harvester.contracts.wire.leases import JOB_HEADER, SESSION_HEADER
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
from scheduler.gateway.config import GatewaySettings
from scheduler.gateway.engine import RequestRefused
from scheduler.gateway.open_turns import IdInUse
from scheduler.gateway.policy.routing_events import (
    Refusal,
    RefuseTurn,
)
from scheduler.gateway.policy.trajectories import Turn
from scheduler.gateway.requests import checked_trajectory, decode_generate
from scheduler.gateway.scheduler import Scheduler
from scheduler.gateway.status import render_metrics, status
from scheduler.gateway.tenants import Tenants
from scheduler.gateway.weight_sync import WeightSyncRoutes

_ENCODER = msgspec.json.Encoder()
_REFUSED_STATUS = {
    Refusal.VERSION: 409,
    Refusal.REQUEST: 422,
    Refusal.CONTEXT: 400,
    Refusal.JOB: 503,
    Refusal.FULL: 503,
}
FOR_MAX_S = 3600.0
_MODEL_CHARS = 200


class _Enabled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: bool
    for_s: Annotated[float, msgspec.Meta(gt=0.0, le=FOR_MAX_S)] | None = None
    """Switched off after this long unless renewed, in s; None: it stays."""


class TurnRefused(RoseMuxError):  # noqa: N818 - an answer, not a fault
    def __init__(self, refused: RefuseTurn) -> None:
        super().__init__(refused.reason)
        self.status = _REFUSED_STATUS[refused.refusal]


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
            middlewares=[errors_as_replies(_STATUSES, try_later=(409, 503))],
            client_max_size=settings.max_body_bytes,
        )
        self.app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/v1/jobs/{job}/versions", self._publish),
                web.post("/v1/jobs/{job}/activate", self._activate),
                web.post("/v1/jobs/{job}/harvesting", self._harvesting),
                web.post("/v1/jobs/{job}/dedicated", self._dedicated),
                *WeightSyncRoutes(scheduler, self._job_of_path).routes(),
                web.get("/v1/status", self._status),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
            ]
        )

    def close(self) -> None:
        self._closing = True

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        job = self._job(request, request.headers.get(JOB_HEADER))
        if self._closing:
            raise Exhausted("the gateway is shutting down")
        asked = self._checked(job, await request.read())
        session = request.headers.get(SESSION_HEADER)
        trajectory = checked_trajectory(session, request_id=asked.request_id)
        if asked.stream:
            stream = _TurnStream(request, asked)
            work = self._scheduler.generate(job, trajectory, asked, on_turn=stream.follow)
            return await stream.serve(work)
        turn, refused = await self._scheduler.generate(job, trajectory, asked)
        if refused is not None:
            raise TurnRefused(refused)
        return json_reply(GenerateReply(request_id=asked.request_id, choices=(turn.choice(),)))

    def _checked(self, job: JobId, body: bytes) -> GenerateRequest:
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
        job = self._job(request, request.match_info["job"])
        version, engines = await self._scheduler.activate(job)
        return json_reply(VersionSwitched(version=WeightVersion(version), engines=engines))

    async def _harvesting(self, request: web.Request) -> web.Response:
        job = self._job(request, request.match_info["job"])
        wanted = await _switch(request)
        self._scheduler.set_harvesting(job, enabled=wanted.enabled, for_s=wanted.for_s)
        return json_reply({"job": job, "harvesting": wanted.enabled})

    async def _dedicated(self, request: web.Request) -> web.Response:
        job = self._job(request, request.match_info["job"])
        wanted = await _switch(request)
        self._scheduler.use_dedicated(job, enabled=wanted.enabled, for_s=wanted.for_s)
        return json_reply({"job": job, "dedicated": wanted.enabled})

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


class _TurnStream:
    """A turn as server-sent events, as fast as the client reads."""

    def __init__(self, request: web.Request, asked: GenerateRequest) -> None:
        self._request = request
        self._asked = asked
        self._turn: Turn | None = None
        self._more = asyncio.Event()
        self._sent_tokens = 0
        self._sent_end = False

    def follow(self, turn: Turn) -> Callable[[], None]:
        self._turn = turn
        return self._more.set

    async def serve(self, work: Awaitable[tuple[Turn, RefuseTurn | None]]) -> web.StreamResponse:
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _task: self._more.set())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await self._more.wait()
            if task.done() and (refused := task.result()[1]) is not None:
                raise TurnRefused(refused)
            await response.prepare(self._request)
            while not task.done():
                self._more.clear()
                await self._send(response)
                await self._more.wait()
            task.result()
            await self._send(response)
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return response

    async def _send(self, response: web.StreamResponse) -> None:
        assert self._turn is not None
        choice = self._turn.choice(start=self._sent_tokens)
        ended = choice.finish_reason is not None
        if self._sent_end or (not choice.token_ids and not ended):
            return
        self._sent_end = ended
        self._sent_tokens += len(choice.token_ids)
        if ended:
            choice = msgspec.structs.replace(choice, spans=self._turn.choice().spans)
        reply = GenerateReply(request_id=self._asked.request_id, choices=(choice,))
        await response.write(b"data: " + _ENCODER.encode(reply) + b"\n\n")


async def _switch(request: web.Request) -> _Enabled:
    wanted = await decoded_body(request, _Enabled, most_bytes=SMALL_BODY_BYTES)
    if wanted.for_s is not None and not wanted.enabled:
        raise PeerProtocolError("for_s: goes with enabled: true")
    return wanted
