"""The gateway as the one engine of a trainer that lists engines, and as that trainer's router.

slime and miles call these with `--rollout-external-engine-addrs` and `--sglang-router-ip` at the
gateway. Engines that the trainers list are refused: the gateway's configuration names its engines.
Version 0 is the checkpoint that the engines started with.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

import msgspec
from aiohttp import web

from harvester.contracts.errors import PeerProtocolError, Stale
from harvester.contracts.ids import JobId, WeightVersion, checked_name
from harvester.contracts.wire.rollouts import VersionSwitched
from harvester.platform.http_kit import SMALL_BODY_BYTES, decoded_body
from harvester.platform.route_table import Route
from scheduler.gateway.dialects.weight_sync import ControlReply
from scheduler.gateway.openapi import NEW_VERSION
from scheduler.gateway.policy.versions_events import VersionPublished
from scheduler.gateway.scheduler import Scheduler
from scheduler.model import BASE_VERSION

_WORKER_ID = "gateway"


class RouterWorker(msgspec.Struct, frozen=True):
    url: str
    id: str = _WORKER_ID
    worker_type: str = "regular"
    is_healthy: bool = True


class RouterReply(msgspec.Struct, frozen=True):
    workers: tuple[RouterWorker, ...]
    urls: tuple[str, ...]
    """The same for routers before SGLang's own."""


class RegisteredWorker(msgspec.Struct, frozen=True):
    url: str
    worker_type: str = "regular"


class PulledWeights(msgspec.Struct, frozen=True):
    """`pull_weights` of slime's and miles' engines."""

    source_dir: str
    """Directory of versions; its last part names the store under the engines' weight root."""
    target_version: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class LoadedWeights(msgspec.Struct, frozen=True):
    """`update_weights_from_disk`, which in slime and miles follows each `pull_weights`."""

    weight_version: str | None = None


class RouterLoad(msgspec.Struct, frozen=True):
    num_reqs: int
    dp_rank: int = 0


class RouterLoads(msgspec.Struct, frozen=True):
    loads: tuple[RouterLoad, ...]


@dataclass(frozen=True, slots=True)
class EngineListRoutes:
    _scheduler: Scheduler
    _activate: Callable[[JobId, web.Request], Awaitable[VersionSwitched]]
    """Refuses callers that may not take the engines."""

    @Route("GET /workers", "The gateway, as the only engine")
    @Route("GET /list_workers", "The gateway, as the only engine")
    async def _list(self, request: web.Request) -> RouterReply:
        own = _own_url(request)
        return RouterReply(workers=(RouterWorker(own),), urls=(own,))

    @Route("POST /workers", "Accepts the gateway itself", RegisteredWorker)
    @Route("POST /add_worker", "Accepts the gateway itself", RegisteredWorker, query=("url",))
    async def _register(self, request: web.Request) -> RouterWorker:
        """Raises PeerProtocolError for every engine but the gateway itself."""
        if (url := request.query.get("url")) is None:
            body = await decoded_body(request, RegisteredWorker, most_bytes=SMALL_BODY_BYTES)
            url = body.url
        if url.rstrip("/") != _own_url(request):
            raise PeerProtocolError(
                f"url: {url[:200]!r} is not this gateway, which takes no engines from a trainer; "
                "list them in its configuration, and name the gateway as the only engine"
            )
        return RouterWorker(_own_url(request))

    @Route("GET /v1/loads", "Open turns of the job")
    async def _loads(self, job: JobId) -> RouterLoads:
        return RouterLoads((RouterLoad(num_reqs=len(self._scheduler.ledgers[job])),))

    @Route("POST /pull_weights", "Publish", refuses=NEW_VERSION)
    async def _pull(self, job: JobId, request: web.Request, body: PulledWeights) -> ControlReply:
        """Returns when the job's dedicated engines hold the version.

        Raises Stale where the job is past it, as it is when a trainer counts from 1 again.
        """
        version, versions = WeightVersion(body.target_version), self._scheduler.versions
        if version != BASE_VERSION:
            store = checked_name(PurePosixPath(body.source_dir).name, what="source_dir")
            await versions.publish(VersionPublished(job=job, store=store, version=version))
        elif (current := versions.newest(job)) != BASE_VERSION:
            raise Stale(
                f"job {job} is at version {current} of an earlier run, and versions only rise; "
                "begin this run as another job"
            )
        else:
            await self._activate(job, request)
        return ControlReply(success=True, message="Weights pulled")

    @Route("POST /update_weights_from_disk", "Confirm the version in force")
    async def _loaded(self, job: JobId, body: LoadedWeights) -> ControlReply:
        version = str(self._scheduler.versions.newest(job))
        if body.weight_version != version:
            raise PeerProtocolError(
                f"weight_version {body.weight_version!r}: job {job} is at {version}, and engines "
                "load no path of the caller's; publish versions through a store, with "
                "/pull_weights or /v1/jobs/{job}/versions"
            )
        return ControlReply(success=True, message="Weights are in force")


def _own_url(request: web.Request) -> str:
    """The gateway as its caller names it, with the base path of a job where the call has one."""
    base = request.path.rpartition("/")[0]
    return f"{request.scheme}://{request.host}{base}"
