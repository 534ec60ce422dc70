"""The agent's OpenAPI document: every route, with the types that its handler takes and answers."""

from collections.abc import Mapping

from harvester.contracts.wire.leases import (
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
    SlotOffers,
)
from harvester.contracts.wire.stops import StopReply, StopRequest, StopsInForce
from harvester.platform.openapi_document import PATH, TEXT, Operation


def _probe(summary: str) -> Operation:
    return Operation(summary, answers=str, kinds=(TEXT,), refuses=(503,), fails=(TEXT,))


OPERATIONS: Mapping[str, Operation] = {
    "GET /v1/slots": Operation("The slots: offers, forecasts, stops", None, SlotOffers),
    "POST /v1/leases": Operation("Take a lease", LeaseRequest, LeaseGranted | LeaseRefused),
    "POST /v1/leases/{lease}/renew": Operation(
        "Renew a lease", LeaseRenewal, LeaseGranted | LeaseEnded
    ),
    "DELETE /v1/leases/{lease}": Operation("Give a lease back", None, LeaseEnded),
    "GET /v1/stops": Operation("Orders to stop that are in force", None, StopsInForce),
    "POST /v1/stops": Operation("Hold, drain or resume", StopRequest, StopReply, refuses=(503,)),
    "GET /healthz": _probe("200 while the agent beats"),
    "GET /readyz": _probe("200 while the signals of all slots are fresh"),
    "GET /metrics": Operation("Prometheus text", None, str, (TEXT,)),
    f"GET {PATH}": Operation("This document"),
}


def refuses(name: str) -> tuple[int, ...]:
    """Statuses of the agent's token, which its probes do not need; an observer's only reads."""
    if name in ("GET /healthz", "GET /readyz"):
        return ()
    return (401,) if name.startswith("GET ") else (401, 403)
