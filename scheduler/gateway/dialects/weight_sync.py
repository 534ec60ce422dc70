"""A job's engines as one vLLM server, for trainers that speak vLLM's RL control routes.

POST /init_weight_transfer_engine   {"init_info": {}}
POST /start_weight_update
POST /update_weights                {"update_info": {"store": "job-a", "version": 7}}
POST /finish_weight_update          {"weight_version": "7"}
POST /update_weight_version         {"new_version": "7"}: refused unless it is in force
POST /pause?mode=abort|wait|keep&for_s=60   POST /resume   GET /is_paused
POST /pause_generation              POST /continue_generation: SGLang's words for them, and
                                    AReaL's with areal_ before them
POST /reset_prefix_cache            GET and POST /flush_cache
GET  /weight_info   GET /get_world_size   GET /is_sleeping

The same routes are under /v1/jobs/{job}/vllm, with GET /health. An update is a publish: it returns
when the job's dedicated engines hold the version. A paused job's turns wait, and a client that
waits gets its tokens after the pause. Rendezvous of transports that need the trainer and each
engine in one group (NCCL, CUDA IPC) are refused at once: an engine that comes or goes must not end
the group. So is what would reach past the gateway into its engines.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import JobId, WeightVersion, checked_name
from harvester.contracts.wire.rollouts import PublishedNumber
from harvester.platform.http_kit import SMALL_BODY_BYTES, decoded_body, json_reply
from scheduler.gateway.job_pauses import PauseMode
from scheduler.gateway.job_switches import LimitedTime
from scheduler.gateway.policy.versions_events import VersionPublished
from scheduler.gateway.scheduler import Scheduler

_PREFIX = "/v1/jobs/{job}/vllm"
_MODES = {mode.value: mode for mode in PauseMode}
_SGLANG_MODES = {"abort": PauseMode.ABORT, "retract": PauseMode.KEEP, "in_place": PauseMode.KEEP}

T = TypeVar("T")


_STORE = 'publish versions through a store (backend "rosemux", /v1/jobs/{job}/versions)'
_NO_GROUP = f"a fleet takes no weights through a process group of its engines; {_STORE}"
_NO_PATH = f"engines load no path of the caller's; {_STORE}"
_NO_SLEEP = (
    "the gateway's engines do not sleep at a job's word; switch the job's use of them with "
    "/v1/jobs/{job}/dedicated and /v1/jobs/{job}/harvesting"
)
_NO_REACH = "a call into the engines passes the gateway by; ask an engine itself"

REFUSED_ROUTES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("/init_communicator", "/init_communicator/", "/close_communicator/"),
            *("/update_named_param/", "/batch_update_named_params/"),
            *("/init_broadcaster", "/init_weights_update_group"),
            *("/update_weights_from_distributed", "/update_weights_from_tensor"),
            *("/start_draft_weight_update", "/areal_init_weights_update_group"),
            *("/areal_set_update_weight_meta", "/areal_set_update_weight_meta_lora"),
            *("/areal_update_weights_xccl", "/areal_update_weights_lora_xccl"),
        ),
        _NO_GROUP,
    ),
    **dict.fromkeys(
        (
            *("/load_lora_adapter", "/v1/load_lora_adapter"),
            *("/unload_lora_adapter", "/v1/unload_lora_adapter"),
            *("/areal_update_weights", "/areal_update_weights_lora"),
        ),
        _NO_PATH,
    ),
    **dict.fromkeys(
        (
            *("/sleep", "/wake_up", "/release_kv_cache_memory"),
            *("/release_memory_occupation", "/resume_memory_occupation"),
        ),
        _NO_SLEEP,
    ),
    **dict.fromkeys(("/collective_rpc", "/weight_checker"), _NO_REACH),
}
"""Control routes of vLLM, TRL, prime-rl, AReaL and SGLang that a fleet does not offer, and why."""


class WeightTransferInit(msgspec.Struct, frozen=True):
    init_info: dict[str, Any] = {}


class WeightUpdateInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    store: str
    version: PublishedNumber
    state_hash: str | None = None


class WeightUpdate(msgspec.Struct, frozen=True):
    update_info: WeightUpdateInfo


class WeightUpdateEnd(msgspec.Struct, frozen=True):
    weight_version: str | None = None


class WeightVersionLabel(msgspec.Struct, frozen=True):
    new_version: str


class GenerationPause(msgspec.Struct, frozen=True):
    mode: str = "abort"
    """SGLang's: `abort`, or `retract` and `in_place`, which keep the turns."""
    for_s: LimitedTime = None
    """Ours: time after which the pause ends unless it is begun again, in s."""


class ControlReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outcome of a control call, in the fields that vLLM's clients read."""

    message: str = ""
    status: str = ""
    success: bool | None = None
    new_version: str | None = None
    is_paused: bool | None = None
    is_sleeping: bool | None = None
    world_size: int | None = None
    weight_version: str | None = None


JobOf: TypeAlias = Callable[[web.Request], JobId]
Control: TypeAlias = Callable[[JobId, web.Request], Awaitable[ControlReply]]


class WeightSyncRoutes:
    def __init__(self, scheduler: Scheduler, job_of: JobOf) -> None:
        self._scheduler = scheduler
        self._job_of = job_of
        self._updated: dict[JobId, WeightVersion] = {}

    def routes(self) -> list[web.RouteDef]:
        own: list[tuple[str, str, Control]] = [
            ("POST", "/init_weight_transfer_engine", self._init),
            ("POST", "/shutdown_weight_transfer_engine", self._nothing),
            ("POST", "/start_weight_update", self._start),
            ("POST", "/update_weights", self._update),
            ("POST", "/finish_weight_update", self._finish),
            ("POST", "/update_weight_version", self._label),
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("GET", "/is_paused", self._is_paused),
            ("POST", "/pause_generation", self._pause_generation),
            ("POST", "/continue_generation", self._resume),
            ("POST", "/areal_pause_generation", self._pause_generation),
            ("POST", "/areal_continue_generation", self._resume),
            ("POST", "/reset_prefix_cache", self._nothing),
            ("POST", "/flush_cache", self._nothing),
            ("GET", "/flush_cache", self._nothing),
            ("GET", "/weight_info", self._weight_info),
            ("GET", "/get_world_size", self._world_size),
            ("GET", "/is_sleeping", self._is_sleeping),
        ]
        refused = [
            web.post(path, partial(self._refuse, words)) for path, words in REFUSED_ROUTES.items()
        ]
        return [
            web.get(f"{_PREFIX}/health", self._replied(self._nothing)),
            *(
                web.route(method, prefix + path, self._replied(control))
                for prefix in (_PREFIX, "")
                for method, path, control in own
            ),
            *refused,
        ]

    async def _init(self, _job: JobId, request: web.Request) -> ControlReply:
        if (await _decoded(request, WeightTransferInit)).init_info:
            raise PeerProtocolError(
                'init_info: send {}; a fleet takes versions from a store (backend "rosemux"), not '
                "through a process group of its engines"
            )
        return ControlReply(message="Weight transfer initialized")

    async def _start(self, job: JobId, _request: web.Request) -> ControlReply:
        self._updated.pop(job, None)
        return ControlReply(message="Weight update started")

    async def _update(self, job: JobId, request: web.Request) -> ControlReply:
        info = (await _decoded(request, WeightUpdate)).update_info
        store, version = checked_name(info.store, what="store"), info.version
        known = info.state_hash or ""
        published = VersionPublished(job=job, store=store, version=version, state_hash=known)
        await self._scheduler.versions.publish(published)
        self._updated[job] = version
        if not self._scheduler.versions.is_active(job):
            return ControlReply(
                message=f"Version {version} is announced; engines load it once the job is active"
            )
        return ControlReply(message="Weights updated")

    async def _finish(self, job: JobId, request: web.Request) -> ControlReply:
        named = (await _decoded(request, WeightUpdateEnd)).weight_version
        updated = self._updated.pop(job, None)
        if updated is None:
            raise PeerProtocolError("finish_weight_update without an update_weights before it")
        if named is not None and named != str(updated):
            raise PeerProtocolError(f"weight_version {named!r}: the update was to {updated}")
        return ControlReply(message="Weight update finished")

    async def _label(self, job: JobId, request: web.Request) -> ControlReply:
        label = (await _decoded(request, WeightVersionLabel)).new_version
        version = str(self._scheduler.versions.newest(job))
        if label != version:
            raise PeerProtocolError(
                f"new_version {label!r}: the job is at {version}; a version's number is given by "
                "its publish"
            )
        return ControlReply(success=True, new_version=label)

    async def _pause(self, job: JobId, request: web.Request) -> ControlReply:
        try:
            for_s = msgspec.convert(request.query.get("for_s"), LimitedTime, strict=False)
        except msgspec.ValidationError as error:
            raise PeerProtocolError(f"for_s: {error}") from error
        return await self._paused(job, request.query.get("mode", "abort"), for_s, _MODES)

    async def _pause_generation(self, job: JobId, request: web.Request) -> ControlReply:
        pause = await _decoded(request, GenerationPause)
        return await self._paused(job, pause.mode, pause.for_s, _SGLANG_MODES)

    async def _paused(
        self, job: JobId, mode: str, for_s: float | None, modes: Mapping[str, PauseMode]
    ) -> ControlReply:
        if mode not in modes:
            raise PeerProtocolError(f"mode: send {', '.join(modes)}")
        await self._scheduler.pause(job, modes[mode], for_s=for_s)
        return ControlReply(status="paused")

    async def _resume(self, job: JobId, _request: web.Request) -> ControlReply:
        self._scheduler.resume(job)
        return ControlReply(status="resumed")

    async def _is_paused(self, job: JobId, _request: web.Request) -> ControlReply:
        return ControlReply(is_paused=self._scheduler.is_paused(job))

    async def _weight_info(self, job: JobId, _request: web.Request) -> ControlReply:
        return ControlReply(weight_version=str(self._scheduler.versions.newest(job)))

    async def _world_size(self, _job: JobId, _request: web.Request) -> ControlReply:
        return ControlReply(world_size=1)

    async def _is_sleeping(self, _job: JobId, _request: web.Request) -> ControlReply:
        return ControlReply(is_sleeping=False)

    async def _nothing(self, _job: JobId, _request: web.Request) -> ControlReply:
        # KV of another version is never hit: the engines' salts name it.
        return ControlReply(message="ok", success=True)

    def _replied(self, control: Control) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return json_reply(await control(self._job_of(request), request))

        return handler

    async def _refuse(self, words: str, request: web.Request) -> web.Response:
        self._job_of(request)
        raise PeerProtocolError(f"{request.path}: {words}")


async def _decoded(request: web.Request, kind: type[T]) -> T:
    return await decoded_body(request, kind, most_bytes=SMALL_BODY_BYTES, empty=b"{}")
