"""The trajectory of a request, under the names that frameworks, routers and harnesses use."""

from aiohttp import web

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import TrajectoryId
from harvester.contracts.wire.leases import SESSION_HEADER
from scheduler.gateway.dialects.text_dialect import Body
from scheduler.gateway.dialects.text_fields import SESSION_FIELDS
from scheduler.gateway.requests import checked_trajectory

SESSION_HEADERS = (
    SESSION_HEADER,
    "X-SMG-Routing-Key",
    "X-Multi-Turn-Session-ID",
    "X-Session-Affinity",
    "X-Claude-Code-Session-ID",
    "Session-ID",
    "Modal-Session-ID",
)
"""Headers under which RL frameworks, routers and harnesses name a trajectory; the first present
counts: SkyRL, verifiers, prime-rl and vllm-router; slime, miles and sglang-router; Fireworks (two);
harnesses that vllm-router knows (two); Modal's stitch. Names of users, tenants and single requests
are no trajectories."""

REQUEST_ID_HEADER = "X-Request-Id"
TURN_HEADERS = (*SESSION_HEADERS, REQUEST_ID_HEADER)
"""Headers that may name the trajectory and the request."""


def session_header(request: web.Request) -> str | None:
    """The session that the first header with a name of one gives."""
    given = (request.headers.get(name) for name in SESSION_HEADERS)
    return next(filter(None, given), None)


def session_of(body: Body) -> str | None:
    """The session named by the first session field of the body. Raises PeerProtocolError."""
    for field in SESSION_FIELDS:
        outer, _, inner = field.partition(".")
        given = body.get(outer)
        if inner:
            given = given.get(inner) if isinstance(given, dict) else None
        if given is not None:
            if not isinstance(given, str):
                raise PeerProtocolError(f"{field}: send a string")
            return given
    return None


def trajectory_of(request: web.Request, name: str, session: str | None = None) -> TrajectoryId:
    """Identity from the first session header, else the body's `session`, else the name."""
    return checked_trajectory(session_header(request) or session, request_id=name)
