"""Routes that end open turns of the caller's job before their time.

POST /inference/v1/abort_requests   {"request_ids": [...]}, as vLLM's
POST /abort_requests                the same; without ids, all turns of the job
POST /abort_request                 {"rid": ...} or {"abort_all": true}, as SGLang's
POST /finish_session  /close_session   the end of a trajectory: as SkyRL's router and SGLang take it

An aborted turn's own reply has its tokens so far and `finish_reason` abort. An unknown name is no
error: its turn may just have ended.
"""

import msgspec
from aiohttp import web

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import JobId
from harvester.platform.http_kit import SMALL_BODY_BYTES, decoded_body, json_reply
from scheduler.gateway.dialects.session_names import session_header
from scheduler.gateway.dialects.text_routes import JobOf
from scheduler.gateway.requests import checked_trajectory
from scheduler.gateway.scheduler import Scheduler

_NAMES_BYTES = 1 << 20


class AbortRequests(msgspec.Struct, frozen=True):
    request_ids: tuple[str, ...] | None = None


class SglangAbort(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class FinishSession(msgspec.Struct, frozen=True):
    session_id: str | None = None


class Aborted(msgspec.Struct, frozen=True):
    aborted: int
    """Turns that were open and have ended."""
    status: str = "aborted"


class AbortRoutes:
    def __init__(self, scheduler: Scheduler, job_of: JobOf) -> None:
        self._scheduler = scheduler
        self._job_of = job_of

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/inference/v1/abort_requests", self._abort_named),
            web.post("/abort_requests", self._abort_requests),
            web.post("/abort_request", self._abort_request),
            web.post("/finish_session", self._finish_session),
            web.post("/close_session", self._finish_session),
        ]

    async def _abort_named(self, request: web.Request) -> web.Response:
        job = self._job_of(request)
        ids = (await decoded_body(request, AbortRequests, most_bytes=_NAMES_BYTES)).request_ids
        if ids is None:
            raise PeerProtocolError("request_ids: name the requests to abort")
        return await self._abort(job, ids)

    async def _abort_requests(self, request: web.Request) -> web.Response:
        job = self._job_of(request)
        named = await decoded_body(request, AbortRequests, empty=b"{}", most_bytes=_NAMES_BYTES)
        return await self._abort(job, named.request_ids or None)

    async def _abort_request(self, request: web.Request) -> web.Response:
        job = self._job_of(request)
        meant = await decoded_body(request, SglangAbort, most_bytes=SMALL_BODY_BYTES)
        if not meant.rid and not meant.abort_all:
            raise PeerProtocolError("rid: name the request to abort, or send abort_all: true")
        return await self._abort(job, None if meant.abort_all else (meant.rid or "",))

    async def _abort(self, job: JobId, ids: tuple[str, ...] | None) -> web.Response:
        return json_reply(Aborted(await self._scheduler.abort(job, ids and frozenset(ids))))

    async def _finish_session(self, request: web.Request) -> web.Response:
        job = self._job_of(request)
        body = await decoded_body(request, FinishSession, most_bytes=SMALL_BODY_BYTES, empty=b"{}")
        given = request.query.get("session_id") or session_header(request) or body.session_id
        if not given:
            raise PeerProtocolError("session_id: name the trajectory that has ended")
        trajectory = checked_trajectory(given, request_id="")
        return json_reply(
            Aborted(await self._scheduler.end_trajectory(job, trajectory), "finished")
        )
