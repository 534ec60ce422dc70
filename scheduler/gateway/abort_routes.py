"""Routes that end open turns of the caller's job before their time.

An aborted turn's own reply has its tokens so far and `finish_reason` abort. An unknown name is no
error: its turn may just have ended.
"""

from functools import partial

import msgspec
from aiohttp import web

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import JobId
from harvester.platform.route_table import Route
from scheduler.gateway.dialects.session_names import TURN_HEADERS, session_header
from scheduler.gateway.requests import checked_trajectory
from scheduler.gateway.scheduler import Scheduler


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


_named = partial(Route, body_bytes=1 << 20)
_end = partial(
    Route,
    summary="The end of a trajectory",
    query=("session_id",),
    headers=TURN_HEADERS,
    empty=b"{}",
)


class AbortRoutes:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @_named("POST /inference/v1/abort_requests", "End turns by name")
    async def _abort_named(self, job: JobId, body: AbortRequests) -> Aborted:
        if body.request_ids is None:
            raise PeerProtocolError("request_ids: name the requests to abort")
        return await self._abort(job, body.request_ids)

    @_named("POST /abort_requests", "End turns by name; without names, all of the job", empty=b"{}")
    async def _abort_requests(self, job: JobId, body: AbortRequests) -> Aborted:
        return await self._abort(job, body.request_ids or None)

    @Route("POST /abort_request", "End turns, as SGLang's")
    async def _abort_request(self, job: JobId, body: SglangAbort) -> Aborted:
        if not body.rid and not body.abort_all:
            raise PeerProtocolError("rid: name the request to abort, or send abort_all: true")
        return await self._abort(job, None if body.abort_all else (body.rid or "",))

    async def _abort(self, job: JobId, ids: tuple[str, ...] | None) -> Aborted:
        return Aborted(await self._scheduler.turns[job].abort(ids=ids and frozenset(ids)))

    @_end("POST /finish_session")
    @_end("POST /close_session")
    async def _finish_session(
        self, job: JobId, request: web.Request, body: FinishSession
    ) -> Aborted:
        given = request.query.get("session_id") or session_header(request) or body.session_id
        if not given:
            raise PeerProtocolError("session_id: name the trajectory that has ended")
        trajectory = checked_trajectory(given, request_id="")
        return Aborted(await self._scheduler.turns[job].end_trajectory(trajectory), "finished")
