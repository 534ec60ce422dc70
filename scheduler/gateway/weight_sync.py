"""A job's engines as one vLLM server, for trainers that speak vLLM's own weight-sync client.

POST /v1/jobs/{job}/vllm/init_weight_transfer_engine   {"init_info": {}}
POST .../start_weight_update
POST .../update_weights        {"update_info": {"store": "job-a", "version": 7}}
POST .../finish_weight_update  {"weight_version": "7"}
POST .../pause   POST .../resume
GET  .../get_world_size   GET .../health

An update is a publish: it returns when the job's dedicated engines hold the version. Pausing and
resuming are accepted and do nothing, because the gateway orders every switch itself. Rendezvous of
transports that need the trainer and each engine in one group (NCCL, CUDA IPC) are refused: an
engine that comes or goes must not end the group.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
from aiohttp import web

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import JobId, WeightVersion, checked_name
from harvester.platform.http_kit import SMALL_BODY_BYTES, decoded_body

_PREFIX = "/v1/jobs/{job}/vllm"

T = TypeVar("T")
JobOf: TypeAlias = Callable[[web.Request], JobId]
"""The job that a request means, if the caller may speak for it."""


class WeightReceivers(Protocol):
    def publish(
        self, job: JobId, *, store: str, version: WeightVersion, cut_exact: bool
    ) -> Awaitable[object]:
        """Returns when the job's dedicated engines serve the version."""
        ...


class _Init(msgspec.Struct, frozen=True):
    init_info: dict[str, Any] = {}


class _UpdateInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    store: str
    version: int
    state_hash: str | None = None
    """Accepted and ignored: each engine checks its load against the store's own record."""


class _Update(msgspec.Struct, frozen=True):
    update_info: _UpdateInfo


class _Finish(msgspec.Struct, frozen=True):
    weight_version: str | None = None


class WeightSyncRoutes:
    def __init__(self, fleet: WeightReceivers, job_of: JobOf) -> None:
        self._fleet = fleet
        self._job_of = job_of
        self._updated: dict[JobId, WeightVersion] = {}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(f"{_PREFIX}/init_weight_transfer_engine", self._init),
            web.post(f"{_PREFIX}/start_weight_update", self._start),
            web.post(f"{_PREFIX}/update_weights", self._update),
            web.post(f"{_PREFIX}/finish_weight_update", self._finish),
            web.post(f"{_PREFIX}/pause", self._nothing),
            web.post(f"{_PREFIX}/resume", self._nothing),
            web.get(f"{_PREFIX}/get_world_size", self._world_size),
            web.get(f"{_PREFIX}/health", self._nothing),
        ]

    async def _init(self, request: web.Request) -> web.Response:
        self._job_of(request)
        if (await _decoded(request, _Init)).init_info:
            raise PeerProtocolError(
                'init_info: send {}; a fleet takes versions from a store (backend "rosemux"), not '
                "through a process group of its engines"
            )
        return _message("Weight transfer initialized")

    async def _start(self, request: web.Request) -> web.Response:
        self._updated.pop(self._job_of(request), None)
        return _message("Weight update started")

    async def _update(self, request: web.Request) -> web.Response:
        job = self._job_of(request)
        info = (await _decoded(request, _Update)).update_info
        if info.version < 1:
            raise PeerProtocolError("version: versions begin at 1")
        store, version = checked_name(info.store, what="store"), WeightVersion(info.version)
        await self._fleet.publish(job, store=store, version=version, cut_exact=False)
        self._updated[job] = version
        return _message("Weights updated")

    async def _finish(self, request: web.Request) -> web.Response:
        job = self._job_of(request)
        said = (await _decoded(request, _Finish)).weight_version
        updated = self._updated.pop(job, None)
        if updated is None:
            raise PeerProtocolError("finish_weight_update without an update_weights before it")
        if said is not None and said != str(updated):
            raise PeerProtocolError(f"weight_version {said!r}: the update was to {updated}")
        return _message("Weight update finished")

    async def _world_size(self, request: web.Request) -> web.Response:
        self._job_of(request)
        return web.json_response({"world_size": 1})

    async def _nothing(self, request: web.Request) -> web.Response:
        self._job_of(request)
        return _message("ok")


def _message(text: str) -> web.Response:
    return web.json_response({"message": text})


async def _decoded(request: web.Request, kind: type[T]) -> T:
    return await decoded_body(request, kind, most_bytes=SMALL_BODY_BYTES, empty=b"{}")
