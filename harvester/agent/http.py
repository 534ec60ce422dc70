"""The agent's HTTP: leases, stops, health and metrics. It translates and checks; tables decide.

Protocol answers, refusals included, are 200 with the tagged value. 400 is a malformed request, 401
a missing token, 403 one that may not stop or only observes, 413 a body over the limit.
"""

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from harvester.agent.node import NodeAgent
from harvester.agent.openapi import OPERATIONS, refuses
from harvester.contracts.ids import LeaseId, checked_name
from harvester.contracts.wire.leases import LeaseRenewal, LeaseRequest, SlotOffers
from harvester.contracts.wire.stops import StopRequest, StopsInForce
from harvester.platform.bearer import TokenFile
from harvester.platform.http_kit import (
    SMALL_BODY_BYTES,
    decoded_body,
    error_reply,
    errors_as_replies,
    json_reply,
    token_required,
)
from harvester.platform.openapi_document import document, openapi_route

_PROBES = ("/healthz", "/readyz")
_MAX_CALLER = 200


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

    accepts = None if tokens is None else accepted
    observes = None if observers is None else observers.accepts
    app = web.Application(
        client_max_size=SMALL_BODY_BYTES,
        middlewares=[
            token_required(accepts, of="agent", probes=_PROBES, observes=observes),
            errors_as_replies({web.HTTPException: None}),
        ],
    )
    app.add_routes(
        [
            web.get("/v1/slots", routes.slots),
            web.post("/v1/leases", routes.take),
            web.post("/v1/leases/{lease}/renew", routes.renew),
            web.delete("/v1/leases/{lease}", routes.release),
            web.get("/v1/stops", routes.stops),
            web.post("/v1/stops", routes.order),
            web.get("/healthz", routes.healthz),
            web.get("/readyz", routes.readyz),
            web.get("/metrics", routes.metrics),
            openapi_route(document("agent", OPERATIONS, refuses=refuses)),
        ]
    )
    return app


class Routes:
    def __init__(
        self, node: NodeAgent, tokens: TokenFile | None, operators: TokenFile | None
    ) -> None:
        self._node = node
        self._tokens = tokens
        self._operators = operators

    async def slots(self, _request: web.Request) -> web.Response:
        return json_reply(
            SlotOffers(
                node=self._node.leases.node,
                slots=tuple(slot.offer() for slot in self._node.slots),
                restart_needed=self._node.restart_needed,
                stops=self._node.stops.stops,
                unopened=self._node.unopened,
                config_refused="; ".join(self._node.refused.values()),
                slots_file_age_s=self._node.slots_file_age_s,
            )
        )

    async def stops(self, _request: web.Request) -> web.Response:
        return json_reply(StopsInForce(node=self._node.leases.node, stops=self._node.stops.stops))

    async def order(self, request: web.Request) -> web.Response:
        requested = await decoded_body(request, StopRequest, name="StopRequest")
        sent = request.headers.get("Authorization", "")
        operates = self._operators is None or self._operators.accepts(sent)
        if not requested.cluster and not operates:
            return error_reply(403, "send an operator's token (operator_token_file)")
        return json_reply(self._node.order(requested, who=self._caller(request)))

    async def take(self, request: web.Request) -> web.Response:
        requested = await decoded_body(request, LeaseRequest, name="LeaseRequest")
        for what in ("request_id", "slot", "tenant", "job"):
            checked_name(getattr(requested, what), what=what)
        return json_reply(self._node.take(requested, who=self._caller(request)))

    async def renew(self, request: web.Request) -> web.Response:
        lease = _lease(request)
        renewal = await decoded_body(request, LeaseRenewal, name="LeaseRenewal")
        return json_reply(self._node.renew(lease, renewal, who=self._caller(request)))

    async def release(self, request: web.Request) -> web.Response:
        return json_reply(self._node.release(_lease(request), who=self._caller(request)))

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

    async def healthz(self, _request: web.Request) -> web.Response:
        late_s = self._node.late_s()
        text = f"last beat {late_s:.3f} s ago\n"
        return web.Response(status=200 if self._node.alive() else 503, text=text)

    async def readyz(self, _request: web.Request) -> web.Response:
        silent = self._node.silent_slots()
        text = "".join(f"{name}: {reason}\n" for name, reason in silent) or "signals are fresh\n"
        return web.Response(status=503 if silent else 200, text=text)

    async def metrics(self, _request: web.Request) -> web.Response:
        self._node.refresh_metrics()
        body = generate_latest(self._node.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _lease(request: web.Request) -> LeaseId:
    return LeaseId(checked_name(request.match_info["lease"], what="lease"))
