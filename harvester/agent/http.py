"""The agent's HTTP: leases, health and metrics. It translates and checks; the lease book decides.

Protocol answers, refusals included, are 200 with the tagged value. 400 is a malformed request, 401
a missing token, 413 a body over the limit.
"""

from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from harvester.agent.node import NodeAgent
from harvester.contracts.errors import UNDECODABLE, PeerProtocolError
from harvester.contracts.ids import LeaseId, checked_name
from harvester.contracts.wire.leases import EndReason, LeaseRenewal, LeaseRequest, SlotOffers
from harvester.platform.bearer import is_sent

MAX_BODY_BYTES = 64 << 10
T = TypeVar("T")


def application(node: NodeAgent, *, token: bytes | None) -> web.Application:
    routes = Routes(node)
    app = web.Application(
        client_max_size=MAX_BODY_BYTES, middlewares=[_authorised(token), _clear_errors]
    )
    app.add_routes(
        [
            web.get("/v1/slots", routes.slots),
            web.post("/v1/leases", routes.take),
            web.post("/v1/leases/{lease}/renew", routes.renew),
            web.delete("/v1/leases/{lease}", routes.release),
            web.get("/healthz", routes.healthz),
            web.get("/readyz", routes.readyz),
            web.get("/metrics", routes.metrics),
        ]
    )
    return app


class Routes:
    def __init__(self, node: NodeAgent) -> None:
        self._node = node

    async def slots(self, _request: web.Request) -> web.Response:
        offers = tuple(slot.offer() for slot in self._node.slots)
        waiting = self._node.restart_needed
        return _json(SlotOffers(node=self._node.book.node, slots=offers, restart_needed=waiting))

    async def take(self, request: web.Request) -> web.Response:
        wanted = await _body(request, LeaseRequest)
        names = {
            "request_id": wanted.request_id,
            "slot": wanted.slot,
            "tenant": wanted.tenant,
            "job": wanted.job,
        }
        for what, name in names.items():
            checked_name(name, what=what)
        return _json(self._node.take(wanted))

    async def renew(self, request: web.Request) -> web.Response:
        lease = _lease(request)
        renewal = await _body(request, LeaseRenewal)
        return _json(self._node.book.renew(lease, renewal, now=self._node.clock.now()))

    async def release(self, request: web.Request) -> web.Response:
        answer = self._node.book.release(_lease(request), now=self._node.clock.now())
        if answer.reason is not EndReason.UNKNOWN:
            self._node.beat()
        return _json(answer)

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


def _authorised(token: bytes | None) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        # Health reveals no secret, and probes carry no token.
        sent = request.headers.get("Authorization", "")
        is_probe = request.path in {"/healthz", "/readyz"}
        if token is not None and not is_probe and not is_sent(token, sent):
            return _error(401, "send the agent's token as Authorization: Bearer ...")
        return await handler(request)

    return middleware


@web.middleware
async def _clear_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except PeerProtocolError as error:
        return _error(400, str(error))


async def _body(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except UNDECODABLE as error:
        raise PeerProtocolError(f"{kind.__name__}: {error}") from error


def _lease(request: web.Request) -> LeaseId:
    return LeaseId(checked_name(request.match_info["lease"], what="lease"))


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    body = msgspec.json.encode({"error": message})
    return web.Response(status=status, body=body, content_type="application/json")
