"""The gateway's OpenAPI document: every route, with the types that its handler decodes and encodes.

A dialect's own body is an object here; its page is the dialect's.
"""

from collections.abc import Mapping
from typing import Any

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
from harvester.platform.openapi_document import JSON, PATH, TEXT, Operation, Parameter
from harvester.platform.openapi_document import document as openapi_document
from scheduler.gateway.abort_routes import Aborted, AbortRequests, FinishSession, SglangAbort
from scheduler.gateway.dialects import tinker_routes, weight_sync
from scheduler.gateway.dialects.engine_list_routes import (
    LoadedWeights,
    PulledWeights,
    RegisteredWorker,
    RouterLoads,
    RouterReply,
    RouterWorker,
)
from scheduler.gateway.dialects.session_names import SESSION_HEADERS
from scheduler.gateway.dialects.text_routes import REQUEST_ID_HEADER
from scheduler.gateway.dialects.weight_sync import REFUSED_ROUTES, ControlReply
from scheduler.gateway.job_paths import JOB_BASE
from scheduler.gateway.job_switches import SwitchRequest

RETRIED = (409, 429, 503)
"""Statuses of replies that say when to try again."""
_EVENTS = "text/event-stream"
_OBJECT = dict[str, Any]
_STREAMED = (JSON, _EVENTS)
_TURN_HEADERS = (*SESSION_HEADERS, REQUEST_ID_HEADER)
"""Headers that may name the trajectory and the request."""
_SAMPLES = (404, 409, 410, 422, 429, 503)
_OPENAI_SAMPLES = (404, 409, 410, 422, 502, 503)
_RENDERER = (422, 429, 502, 503)
_NEW_VERSION = (409, 503)
_UNNAMED = frozenset(
    f"{method} {path}"
    for method in ("GET", "POST")
    for path in ("/health", "/health_generate", "/ping", "/version", "/healthz", "/readyz", PATH)
)
"""Routes that ask for no token and no job."""
_CALLER = (401, 403)
_JOB = (400, *_CALLER)
_EITHER_CONTROL: Mapping[str, Operation] = {
    "POST /init_weight_transfer_engine": Operation(
        "Begin weight transfer; init_info must be empty",
        weight_sync.WeightTransferInit,
        ControlReply,
    ),
    "POST /shutdown_weight_transfer_engine": Operation("Accepted", None, ControlReply),
    "POST /start_weight_update": Operation("Begin an update", None, ControlReply),
    "POST /update_weights": Operation(
        "Publish", weight_sync.WeightUpdate, ControlReply, refuses=_NEW_VERSION
    ),
    "POST /finish_weight_update": Operation(
        "End an update", weight_sync.WeightUpdateEnd, ControlReply
    ),
    "POST /update_weight_version": Operation(
        "Confirm the version in force", weight_sync.WeightVersionLabel, ControlReply
    ),
    "POST /pause": Operation("Hold the job's turns", None, ControlReply, query=("mode", "for_s")),
    "POST /resume": Operation("End the pause", None, ControlReply),
    "GET /is_paused": Operation("Whether the job is paused", None, ControlReply),
    **{
        f"POST /{prefix}pause_generation": Operation(
            "Hold the job's turns", weight_sync.GenerationPause, ControlReply
        )
        for prefix in ("", "areal_")
    },
    **{
        f"POST /{prefix}continue_generation": Operation("End the pause", None, ControlReply)
        for prefix in ("", "areal_")
    },
    **{
        each: Operation("Accepted: KV of another version is never hit", None, ControlReply)
        for each in ("POST /reset_prefix_cache", "POST /flush_cache", "GET /flush_cache")
    },
    "GET /weight_info": Operation("The job's newest version", None, ControlReply),
    "GET /get_world_size": Operation("1: no engine joins a group", None, ControlReply),
    "GET /is_sleeping": Operation("false", None, ControlReply),
}
OPERATIONS: Mapping[str, Operation] = {
    f"POST {GENERATE_ROUTE}": Operation(
        "One turn, token ids in and out",
        GenerateRequest,
        GenerateReply,
        _STREAMED,
        headers=_TURN_HEADERS,
        refuses=_SAMPLES,
    ),
    **{
        f"POST {path}": Operation(
            "OpenAI's",
            _OBJECT,
            _OBJECT,
            _STREAMED,
            headers=_TURN_HEADERS,
            refuses=_OPENAI_SAMPLES,
        )
        for path in ("/v1/chat/completions", "/v1/completions")
    },
    "POST /v1/completions/render": Operation(
        "vLLM's, by the renderer", _OBJECT, _OBJECT | list[_OBJECT], refuses=_RENDERER
    ),
    **{
        f"POST {path}": Operation("vLLM's, by the renderer", _OBJECT, refuses=_RENDERER)
        for path in ("/v1/chat/completions/render", "/tokenize", "/detokenize")
    },
    "GET /v1/models": Operation("Names that `model` may have"),
    "GET /v1/models/{model}": Operation("One of them; 404 for another name", refuses=(404,)),
    "POST /generate": Operation(
        "SGLang's",
        _OBJECT,
        _OBJECT | list[_OBJECT],
        _STREAMED,
        headers=_TURN_HEADERS,
        refuses=(*_SAMPLES, 502),
    ),
    **{
        each: Operation("200 while an engine is up", kinds=(), refuses=(503,), fails=())
        for each in ("GET /health", "GET /health_generate", "GET /ping", "POST /ping")
    },
    "GET /version": Operation("vLLM's: the version of an engine"),
    "GET /get_model_info": Operation("SGLang's: model and version"),
    "GET /model_info": Operation("SGLang's: model and version"),
    "GET /get_weight_version": Operation("SGLang's: the job's newest version"),
    **{
        f"GET {path}": Operation("SGLang's, and vLLM's `vllm_config`")
        for path in ("/server_info", "/get_server_info")
    },
    **{
        f"GET /{name}": Operation("The gateway, as the only engine", None, RouterReply)
        for name in ("workers", "list_workers")
    },
    "POST /workers": Operation("Accepts the gateway itself", RegisteredWorker, RouterWorker),
    "POST /add_worker": Operation(
        "Accepts the gateway itself", RegisteredWorker, RouterWorker, query=("url",)
    ),
    "GET /v1/loads": Operation("Open turns of the job", None, RouterLoads),
    "POST /pull_weights": Operation("Publish", PulledWeights, ControlReply, refuses=_NEW_VERSION),
    "POST /update_weights_from_disk": Operation(
        "Confirm the version in force", LoadedWeights, ControlReply
    ),
    "POST /inference/v1/abort_requests": Operation("End turns by name", AbortRequests, Aborted),
    "POST /abort_requests": Operation(
        "End turns by name; without names, all of the job", AbortRequests, Aborted
    ),
    "POST /abort_request": Operation("End turns, as SGLang's", SglangAbort, Aborted),
    **{
        f"POST /{name}": Operation(
            "The end of a trajectory",
            FinishSession,
            Aborted,
            query=("session_id",),
            headers=_TURN_HEADERS,
        )
        for name in ("finish_session", "close_session")
    },
    **{
        f"POST /api/v1/{path}": Operation("Tinker's", _OBJECT)
        for path in (
            *tinker_routes.ACCEPTED,
            *("create_session", "create_sampling_session", "cancel_future"),
        )
    },
    f"POST {tinker_routes.SAMPLE_ROUTE}": Operation("Tinker's", _OBJECT, refuses=(409, 429, 503)),
    "POST /api/v1/retrieve_future": Operation(
        "Tinker's",
        _OBJECT,
        kinds=(JSON, tinker_routes.PROTOBUF),
        refuses=(408, 410),
        repeats=_OBJECT,
    ),
    **{
        f"GET /api/v1/{path}": Operation("Tinker's")
        for path in ("healthz", "get_server_capabilities", "samplers/{sampler}")
    },
    "POST /v1/jobs/{job}/versions": Operation(
        "A version was published", AnnouncedVersion, VersionSwitched, refuses=_NEW_VERSION
    ),
    "POST /v1/jobs/{job}/activate": Operation(
        "Serve this job from now on", None, VersionSwitched, refuses=(*_NEW_VERSION, 408, 413)
    ),
    "POST /v1/jobs/{job}/harvesting": Operation(
        "Whether it leases slots", SwitchRequest, refuses=(503,)
    ),
    "POST /v1/jobs/{job}/dedicated": Operation(
        "Whether it uses dedicated engines", SwitchRequest, refuses=(503,)
    ),
    "GET /v1/jobs/{job}/vllm/health": Operation("200", None, ControlReply),
    **_EITHER_CONTROL,
    **{
        each.replace(" ", " /v1/jobs/{job}/vllm", 1): operation
        for each, operation in _EITHER_CONTROL.items()
    },
    **{
        f"POST {path}": Operation(f"Refused: {words}", None, None, ())
        for path, words in REFUSED_ROUTES.items()
    },
    "POST /v1/stops": Operation(
        "Hold, drain or resume the cluster", StopRequest, ClusterStopReply, refuses=(503,)
    ),
    "GET /v1/status": Operation("Engines, jobs, queue, leases and counters", None, GatewayStatus),
    "GET /metrics": Operation("Prometheus text", None, str, (TEXT,)),
    "GET /healthz": Operation("200, or 503 while it shuts down", refuses=(503,)),
    "GET /readyz": Operation("200 while it takes turns, else 503", refuses=(503,)),
    f"GET {PATH}": Operation("This document"),
}


def document() -> dict[str, Any]:
    """The routes as OpenAPI 3.1."""
    servers = (
        {"url": "/", "description": f"the caller's only job, or that of {JOB_HEADER}"},
        {
            "url": JOB_BASE,
            "description": "one job, for clients that can send no header",
            "variables": {"base_job": {"default": "job"}},
        },
    )
    return openapi_document(
        "gateway",
        OPERATIONS,
        parameters=_job_header,
        refuses=_of_the_caller,
        retried=RETRIED,
        servers=servers,
    )


def _of_the_caller(name: str) -> tuple[int, ...]:
    if name in _UNNAMED:
        return ()
    return _CALLER if name in ("GET /v1/status", "GET /metrics", "POST /v1/stops") else _JOB


def _job_header(path: str, _operation: Operation) -> list[Parameter]:
    return [] if "{job}" in path else [("header", JOB_HEADER)]
