"""A job's engines as one vLLM server, for trainers that speak vLLM's RL control routes.

The same routes are under /v1/jobs/{job}/vllm, with GET /health. An update is a publish: it returns
when the job's dedicated engines hold the version. A paused job's turns wait, and a client that
waits gets its tokens after the pause. Rendezvous of transports that need the trainer and each
engine in one group (NCCL, CUDA IPC) are refused at once: an engine that comes or goes must not end
the group. So is what would reach past the gateway into its engines.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import JobId, WeightVersion, checked_name
from harvester.contracts.wire.rollouts import PublishedNumber
from harvester.platform.route_table import H, Route, several
from scheduler.gateway.job_paths import route_of
from scheduler.gateway.job_pauses import PauseMode
from scheduler.gateway.job_switches import LimitedTime
from scheduler.gateway.openapi import NEW_VERSION
from scheduler.gateway.policy.versions_events import VersionPublished
from scheduler.gateway.scheduler import Scheduler

_PREFIX = "/v1/jobs/{job}/vllm"
_MODES = {mode.value: mode for mode in PauseMode}
_SGLANG_MODES = {"abort": PauseMode.ABORT, "retract": PauseMode.KEEP, "in_place": PauseMode.KEEP}

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


_NEVER_HIT = "Accepted: KV of another version is never hit"  # The engines' salts name it.


def _control(operation: str, summary: str, **more: Any) -> Callable[[H], H]:
    ways = (operation, operation.replace(" ", f" {_PREFIX}", 1))
    return several(Route(each, summary, empty=b"{}", **more) for each in ways)


class WeightSyncRoutes:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._updated: dict[JobId, WeightVersion] = {}

    @_control("POST /init_weight_transfer_engine", "Begin weight transfer; init_info must be empty")
    async def _init(self, body: WeightTransferInit) -> ControlReply:
        if body.init_info:
            raise PeerProtocolError(
                'init_info: send {}; a fleet takes versions from a store (backend "rosemux"), not '
                "through a process group of its engines"
            )
        return ControlReply(message="Weight transfer initialized")

    @_control("POST /start_weight_update", "Begin an update")
    async def _start(self, job: JobId) -> ControlReply:
        self._updated.pop(job, None)
        return ControlReply(message="Weight update started")

    @_control("POST /update_weights", "Publish", refuses=NEW_VERSION)
    async def _update(self, job: JobId, body: WeightUpdate) -> ControlReply:
        info = body.update_info
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

    @_control("POST /finish_weight_update", "End an update")
    async def _finish(self, job: JobId, body: WeightUpdateEnd) -> ControlReply:
        named, updated = body.weight_version, self._updated.pop(job, None)
        if updated is None:
            raise PeerProtocolError("finish_weight_update without an update_weights before it")
        if named is not None and named != str(updated):
            raise PeerProtocolError(f"weight_version {named!r}: the update was to {updated}")
        return ControlReply(message="Weight update finished")

    @_control("POST /update_weight_version", "Confirm the version in force")
    async def _label(self, job: JobId, body: WeightVersionLabel) -> ControlReply:
        label, version = body.new_version, str(self._scheduler.versions.newest(job))
        if label != version:
            raise PeerProtocolError(
                f"new_version {label!r}: the job is at {version}; a version's number is given by "
                "its publish"
            )
        return ControlReply(success=True, new_version=label)

    @_control("POST /pause", "Hold the job's turns", query=("mode", "for_s"))
    async def _pause(self, job: JobId, request: web.Request) -> ControlReply:
        try:
            for_s = msgspec.convert(request.query.get("for_s"), LimitedTime, strict=False)
        except msgspec.ValidationError as error:
            raise PeerProtocolError(f"for_s: {error}") from error
        return await self._paused(job, request.query.get("mode", "abort"), for_s, _MODES)

    @_control("POST /pause_generation", "Hold the job's turns")
    @_control("POST /areal_pause_generation", "Hold the job's turns")
    async def _pause_generation(self, job: JobId, body: GenerationPause) -> ControlReply:
        return await self._paused(job, body.mode, body.for_s, _SGLANG_MODES)

    async def _paused(
        self, job: JobId, mode: str, for_s: float | None, modes: Mapping[str, PauseMode]
    ) -> ControlReply:
        if mode not in modes:
            raise PeerProtocolError(f"mode: send {', '.join(modes)}")
        await self._scheduler.pauses.begin(job, modes[mode], for_s=for_s)
        return ControlReply(status="paused")

    @_control("POST /resume", "End the pause")
    @_control("POST /continue_generation", "End the pause")
    @_control("POST /areal_continue_generation", "End the pause")
    async def _resume(self, job: JobId) -> ControlReply:
        self._scheduler.pauses.end(job)
        return ControlReply(status="resumed")

    @_control("GET /is_paused", "Whether the job is paused")
    async def _is_paused(self, job: JobId) -> ControlReply:
        return ControlReply(is_paused=self._scheduler.pauses.is_paused(job))

    @_control("GET /weight_info", "The job's newest version")
    async def _weight_info(self, job: JobId) -> ControlReply:
        return ControlReply(weight_version=str(self._scheduler.versions.newest(job)))

    @_control("GET /get_world_size", "1: no engine joins a group")
    async def _world_size(self) -> ControlReply:
        return ControlReply(world_size=1)

    @_control("GET /is_sleeping", "false")
    async def _is_sleeping(self) -> ControlReply:
        return ControlReply(is_sleeping=False)

    @Route(f"GET {_PREFIX}/health", "200")
    @_control("POST /shutdown_weight_transfer_engine", "Accepted")
    @_control("POST /reset_prefix_cache", _NEVER_HIT)
    @_control("POST /flush_cache", _NEVER_HIT)
    @_control("GET /flush_cache", _NEVER_HIT)
    async def _nothing(self) -> ControlReply:
        return ControlReply(message="ok", success=True)

    @several(
        Route(f"POST {path}", f"Refused: {words}", kinds=())
        for path, words in REFUSED_ROUTES.items()
    )
    async def _refuse(self, request: web.Request) -> NoReturn:
        raise PeerProtocolError(f"{request.path}: {REFUSED_ROUTES[route_of(request)]}")
