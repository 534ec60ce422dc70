"""The agent's HTTP: leases, stops, health and metrics. It translates and checks; tables decide.

Protocol answers, refusals included, are 200 with the tagged value. 400 is a malformed request, 401
a missing token, 403 one that may not stop, 413 a body over the limit.
"""

from collections.abc import Callable

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from harvester.agent.node import NodeAgent
from harvester.contracts.ids import LeaseId, checked_name
from harvester.contracts.wire.leases import EndReason, LeaseRenewal, LeaseRequest, SlotOffers
from harvester.contracts.wire.stops import StopRequest, StopsInForce
from harvester.platform.http_kit import (
    SMALL_BODY_BYTES,
    decoded_body,
    error_reply,
    errors_as_replies,
    json_reply,
    token_required,
)

_PROBES = ("/healthz", "/readyz")


def application(
    node: NodeAgent,
    *,
    accepts: Callable[[str], bool] | None = None,
    operates: Callable[[str], bool] | None = None,
) -> web.Application:
    """`accepts` judges Authorization headers, None accepts every caller; `operates` those that may
    stop and resume besides gateways' own orders, None all that are accepted."""
    routes = Routes(node, operates)
    app = web.Application(
        client_max_size=SMALL_BODY_BYTES,
        middlewares=[token_required(accepts, of="agent", probes=_PROBES), errors_as_replies()],
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
        ]
    )
    return app


class Routes:
    def __init__(self, node: NodeAgent, operates: Callable[[str], bool] | None) -> None:
        self._node = node
        self._operates = operates

    async def slots(self, _request: web.Request) -> web.Response:
        offers = tuple(slot.offer() for slot in self._node.slots)
        waiting = self._node.restart_needed
        return json_reply(
            SlotOffers(
                node=self._node.leases.node,
                slots=offers,
                restart_needed=waiting,
                stops=self._node.stops.stops,
            )
        )

    async def stops(self, _request: web.Request) -> web.Response:
        stops = self._node.stops.stops
        return json_reply(StopsInForce(node=self._node.leases.node, stops=stops))

    async def order(self, request: web.Request) -> web.Response:
        wanted = await decoded_body(request, StopRequest, name="StopRequest")
        sent = request.headers.get("Authorization", "")
        if not wanted.cluster and self._operates is not None and not self._operates(sent):
            return error_reply(403, "send an operator's token (operator_token_file)")
        return json_reply(self._node.order(wanted))

    async def take(self, request: web.Request) -> web.Response:
        wanted = await decoded_body(request, LeaseRequest, name="LeaseRequest")
        names = {
            "request_id": wanted.request_id,
            "slot": wanted.slot,
            "tenant": wanted.tenant,
            "job": wanted.job,
        }
        for what, name in names.items():
            checked_name(name, what=what)
        return json_reply(self._node.take(wanted))

    async def renew(self, request: web.Request) -> web.Response:
        lease = _lease(request)
        renewal = await decoded_body(request, LeaseRenewal, name="LeaseRenewal")
        return json_reply(self._node.leases.renew(lease, renewal, now=self._node.clock.now()))

    async def release(self, request: web.Request) -> web.Response:
        answer = self._node.leases.release(_lease(request), now=self._node.clock.now())
        if answer.reason is not EndReason.UNKNOWN:
            self._node.beat()
        return json_reply(answer)

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
