"""The agent's HTTP: leases, stops, health and metrics. It translates and checks; tables decide.

Protocol answers, refusals included, are 200 with the tagged value. 400 is a malformed request, 401
a missing token, 403 one that may not stop or only observes, 413 a body over the limit.
"""

from functools import partial

from aiohttp import web
from prometheus_client import generate_latest

from harvester.agent.node import NodeAgent
from harvester.contracts.ids import LeaseId, checked_name
from harvester.contracts.wire.leases import (
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
    SlotOffers,
)
from harvester.contracts.wire.stops import StopReply, StopRequest, StopsInForce
from harvester.platform.bearer import TokenFile
from harvester.platform.http_kit import (
    SMALL_BODY_BYTES,
    decoded_body,
    errors_as_replies,
    token_required,
)
from harvester.platform.openapi_document import serve_routes
from harvester.platform.route_table import TEXT, Callers, Route, metrics_route, routes_of

_MAX_CALLER = 200
_probe = partial(Route, kinds=(TEXT,), refuses=(503,), fails=(TEXT,), callers=Callers.ANYONE)


def application(
    node: NodeAgent,
    *,
    tokens: TokenFile | None = None,
    operators: TokenFile | None = None,
    observers: TokenFile | None = None,
) -> web.Application:
    """`tokens` judge Authorization headers; None accepts every caller. `operators` are also
    accepted; only they may stop and resume beyond gateways' own orders; None: every accepted caller
    may. `observers` read."""
    routes = Routes(node, tokens, operators)
    files = [file for file in (tokens, operators) if file is not None]

    def accepted(authorization: str) -> bool:
        # All are asked, so that one file's tokens take no less time than another's.
        found = [file.accepts(authorization) for file in files]
        return any(found)

    served = [*routes_of(routes), metrics_route(routes.metrics)]
    accepts = None if tokens is None else accepted
    observes = None if observers is None else observers.accepts
    probes = [route.path for route in served if route.callers is Callers.ANYONE]
    app = web.Application(
        client_max_size=SMALL_BODY_BYTES,
        middlewares=[
            token_required(accepts, of="agent", probes=probes, observes=observes),
            errors_as_replies({web.HTTPException: None}),
        ],
    )
    serve_routes(app, "agent", served, refuses=_refuses)
    return app


def _refuses(route: Route) -> tuple[int, ...]:
    """Statuses of the agent's token; an observer's only reads."""
    return (401,) if route.method == "GET" else (401, 403)


class Routes:
    def __init__(
        self, node: NodeAgent, tokens: TokenFile | None, operators: TokenFile | None
    ) -> None:
        self._node = node
        self._tokens = tokens
        self._operators = operators

    @Route("GET /v1/slots", "The slots: offers, forecasts, stops")
    async def slots(self) -> SlotOffers:
        return SlotOffers(
            node=self._node.leases.node,
            slots=tuple(slot.offer() for slot in self._node.slots),
            restart_needed=self._node.restart_needed,
            stops=self._node.stops.stops,
            unopened=self._node.slots.unopened,
            config_refused="; ".join(self._node.refused.values()),
            slots_file_age_s=self._node.slots_file_age_s,
            audit_fault=self._node.audit.fault,
            slots_file_absent=self._node.slots_file_absent,
            kill_file_fault=self._node.kill_file_fault,
        )

    @Route("GET /v1/stops", "Orders to stop that are in force")
    async def stops(self) -> StopsInForce:
        return StopsInForce(node=self._node.leases.node, stops=self._node.stops.stops)

    @Route("POST /v1/stops", "Hold, drain or resume", StopRequest, refuses=(503,))
    async def order(self, request: web.Request) -> StopReply:
        requested = await decoded_body(request, StopRequest, name="StopRequest")
        sent = request.headers.get("Authorization", "")
        operates = self._operators is None or self._operators.accepts(sent)
        if not requested.cluster and not operates:
            raise web.HTTPForbidden(reason="send an operator's token (operator_token_file)")
        return self._node.order(requested, who=self._caller(request))

    @Route("POST /v1/leases", "Take a lease", LeaseRequest)
    async def take(self, request: web.Request) -> LeaseGranted | LeaseRefused:
        requested = await decoded_body(request, LeaseRequest, name="LeaseRequest")
        for what in ("request_id", "slot", "tenant", "job"):
            checked_name(getattr(requested, what), what=what)
        return self._node.take(requested, who=self._caller(request))

    @Route("POST /v1/leases/{lease}/renew", "Renew a lease", LeaseRenewal)
    async def renew(self, request: web.Request) -> LeaseGranted | LeaseEnded:
        lease = _lease(request)
        renewal = await decoded_body(request, LeaseRenewal, name="LeaseRenewal")
        return self._node.renew(lease, renewal, who=self._caller(request))

    @Route("DELETE /v1/leases/{lease}", "Give a lease back")
    async def release(self, request: web.Request) -> LeaseEnded:
        return self._node.release(_lease(request), who=self._caller(request))

    def _caller(self, request: web.Request) -> str:
        """The caller as far as it is known, for the audit: no token, but its line in the file."""
        known = []
        certificate = request.get_extra_info("peercert") or {}
        for part in certificate.get("subject", ()):
            known += [f"certificate of {value}" for name, value in part if name == "commonName"]
        sent = request.headers.get("Authorization", "")
        for file in (self._tokens, self._operators):
            if file is not None and (line := file.line_of(sent)):
                known.append(f"token {line} of {file.path.name}")
        return ", ".join([*known, f"from {request.remote}"])[:_MAX_CALLER]

    @_probe("GET /healthz", "200 while the agent beats")
    async def healthz(self) -> web.Response:
        late_s = self._node.late_s()
        text = f"last beat {late_s:.3f} s ago\n"
        return web.Response(status=200 if self._node.alive() else 503, text=text)

    @_probe("GET /readyz", "200 while the signals of all slots are fresh")
    async def readyz(self) -> web.Response:
        silent = self._node.silent_slots()
        text = "".join(f"{name}: {reason}\n" for name, reason in silent) or "signals are fresh\n"
        return web.Response(status=503 if silent else 200, text=text)

    def metrics(self) -> bytes:
        self._node.refresh_metrics()
        return generate_latest(self._node.metrics.registry)


def _lease(request: web.Request) -> LeaseId:
    return LeaseId(checked_name(request.match_info["lease"], what="lease"))
