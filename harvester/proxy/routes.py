"""Allowlist of the engine proxy: routes of vLLM by method and path, each for one role.

All that the gateway calls, and nothing else: the engine's other development routes stay on
loopback. Pure.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from harvester.contracts.errors import UNDECODABLE, PeerProtocolError
from harvester.contracts.wire.engines import ENGINE_HEADER, ENGINE_ROUTE, WorkerMethod
from harvester.contracts.wire.leases import EPOCH_HEADER
from harvester.contracts.wire.rollouts import GENERATE_ROUTE


class CallerRole(StrEnum):
    DATA = "data"
    """Turns, text, and what the engine says of itself."""
    CONTROL = "control"
    """Weights, pauses and aborts; all of `data` too."""


@dataclass(frozen=True, slots=True)
class EngineRoute:
    role: CallerRole
    parameters: frozenset[str] = frozenset()
    """Names that its query may have."""


WORKER_CALLS: Final = "/collective_rpc"


def _data(*parameters: str) -> EngineRoute:
    return EngineRoute(CallerRole.DATA, frozenset(parameters))


def _control(*parameters: str) -> EngineRoute:
    return EngineRoute(CallerRole.CONTROL, frozenset(parameters))


ROUTES: Final[Mapping[tuple[str, str], EngineRoute]] = {
    ("POST", GENERATE_ROUTE): _data(),
    ("POST", "/v1/chat/completions/render"): _data(),
    ("POST", "/v1/chat/completions/derender"): _data(),
    ("POST", "/v1/completions/render"): _data(),
    ("POST", "/v1/completions/derender"): _data(),
    ("POST", "/tokenize"): _data(),
    ("POST", "/detokenize"): _data(),
    ("GET", "/health"): _data(),
    ("GET", "/version"): _data(),
    ("GET", "/v1/models"): _data(),
    ("GET", ENGINE_ROUTE): _data(),
    ("GET", "/metrics"): _data("name[]"),
    ("GET", "/metrics/"): _data("name[]"),
    ("POST", "/pause"): _control("mode"),
    ("POST", "/resume"): _control(),
    ("POST", "/init_weight_transfer_engine"): _control(),
    ("POST", "/start_weight_update"): _control(),
    ("POST", "/update_weights"): _control(),
    ("POST", "/finish_weight_update"): _control(),
    ("POST", "/reset_prefix_cache"): _control("reset_running_requests"),
    ("POST", "/abort_requests"): _control(),
    ("POST", WORKER_CALLS): _data(),
}
REQUEST_HEADERS: Final = ("Content-Type", EPOCH_HEADER, ENGINE_HEADER)
REPLY_HEADERS: Final = ("Content-Type", "Retry-After", ENGINE_HEADER)
"""Headers that are passed on, and no others."""


@dataclass(frozen=True, slots=True)
class Refused:
    status: int
    reason: str


def route_for(
    method: str, path: str, parameters: Collection[str], *, role: CallerRole | None
) -> EngineRoute | Refused:
    """The route of a request whose caller has this role; None: an unknown caller."""
    if role is None:
        return Refused(401, "send the engine proxy's token as Authorization: Bearer ...")
    route = ROUTES.get((method, path))
    if route is None:
        return Refused(404, f"{method} {path[:200]} is no route of the engine proxy")
    if route.role is CallerRole.CONTROL and role is not CallerRole.CONTROL:
        return Refused(403, f"{path} needs the token for control; this one is for data")
    if unknown := sorted(set(parameters) - route.parameters):
        return Refused(400, f"{path} takes no parameter {unknown[0][:200]!r} here")
    return route


class WorkerCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    method: WorkerMethod
    kwargs: dict[str, Any] = {}


_READING: Final = WorkerCall(WorkerMethod.WEIGHTS)


def worker_call(body: bytes, *, role: CallerRole) -> bytes | Refused:
    """The call of the engine's workers as it is passed on: it holds only checked parts.

    For `data` the bare question for their weights. Raises PeerProtocolError for every other method
    and field.
    """
    try:
        call = msgspec.json.decode(body, type=WorkerCall)
    except UNDECODABLE as error:
        raise PeerProtocolError(f"{WORKER_CALLS}: {error}") from error
    if role is not CallerRole.CONTROL and call != _READING:
        return Refused(403, f"{WORKER_CALLS} {call.method} needs the token for control")
    return msgspec.json.encode(call)
