"""Facts of several of the gateway's routes, for its OpenAPI document too.

A dialect's own body is an object there; its page is the dialect's.
"""

from typing import Any, Final

from harvester.contracts.wire.leases import JOB_HEADER
from harvester.platform.route_table import EVENTS, JSON, Callers, Route
from scheduler.gateway.dialects.session_names import TURN_HEADERS
from scheduler.gateway.job_paths import JOB_BASE

RETRIED = (409, 429, 503)
"""Statuses of replies that say when to try again."""
TURN: Final[dict[str, Any]] = {
    "kinds": (JSON, EVENTS),
    "headers": TURN_HEADERS,
    "body_bytes": None,
}
"""Routes of turns."""
SAMPLES = (404, 409, 410, 422, 429, 503)
NEW_VERSION = (409, 503)
_SERVERS = (
    {"url": "/", "description": f"the caller's only job, or that of {JOB_HEADER}"},
    {
        "url": JOB_BASE,
        "description": "one job, for clients that can send no header",
        "variables": {"base_job": {"default": "job"}},
    },
)


def _refuses(route: Route) -> tuple[int, ...]:
    """Statuses of a token, and of the job that a tenant's call has to name."""
    return (400, 401, 403) if route.callers is Callers.TENANTS else (401, 403)


def _job_header(route: Route) -> list[tuple[str, str]]:
    return [] if "{job}" in route.path else [("header", JOB_HEADER)]


SHOWN: Final[dict[str, Any]] = {
    "parameters": _job_header,
    "refuses": _refuses,
    "retried": RETRIED,
    "servers": _SERVERS,
}
