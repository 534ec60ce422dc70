"""A route is served, decoded and documented as it is declared."""

from collections.abc import AsyncIterator
from typing import Any, NoReturn

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from harvester.contracts.errors import PeerProtocolError
from harvester.platform.http_kit import errors_as_replies
from harvester.platform.openapi_document import DOCUMENT, PATH, serve_routes
from harvester.platform.route_table import (
    TEXT,
    Callers,
    Route,
    metrics_route,
    routes_of,
    several,
)


class Sum(msgspec.Struct, frozen=True):
    terms: tuple[int, ...] = ()


class Desk:
    @Route("POST /sum", "Adds", empty=b"{}", body_bytes=30)
    async def add(self, body: Sum, factor: int) -> list[int]:
        return [factor * sum(body.terms)]

    @several(Route(f"GET /{name}/{{id:.+}}", "Names", callers=Callers.ANYONE) for name in "ab")
    async def named(self, request: web.Request) -> web.Response:
        return web.Response(status=203, text=request.match_info["id"])

    @Route("POST /never", "Refused", kinds=())
    async def never(self) -> NoReturn:
        raise PeerProtocolError("never")

    @Route("POST /ignored", "Takes anything", takes=Sum)
    async def ignored(self) -> dict[str, Any]:
        return {}


def _admit(request: web.Request, route: Route) -> dict[str, Any]:
    if route.callers is Callers.TENANTS and "Authorization" not in request.headers:
        raise web.HTTPUnauthorized(reason="who?")
    return {"factor": 2}


@pytest.fixture
async def client() -> AsyncIterator[TestClient[Any, Any]]:
    app = web.Application(middlewares=[errors_as_replies({web.HTTPException: None})])
    routes = [*routes_of(Desk()), metrics_route(lambda: b"up 1\n", callers=Callers.OBSERVERS)]
    serve_routes(app, "desk", routes, bases=("", "/base/{n}"), admit=_admit, readers=Callers.ANYONE)
    async with TestClient(TestServer(app), headers={"Authorization": "me"}) as client:
        yield client


async def test_a_body_is_decoded_and_a_value_is_sent_as_json(client: Any) -> None:
    for base in ("", "/base/7"):
        reply = await client.post(f"{base}/sum", json={"terms": [1, 2]})
        assert (reply.status, reply.content_type) == (200, "application/json")
        assert await reply.json() == [6]
    assert await (await client.post("/sum")).json() == [0]
    assert (await client.post("/ignored", data=b"no JSON")).status == 200


async def test_a_wrong_body_and_a_long_one_are_refused(client: Any) -> None:
    for body, status in ((b'{"terms": 1}', 400), (b"{}" + b" " * 30, 413)):
        reply = await client.post("/sum", data=body)
        assert (reply.status, list(await reply.json())) == (status, ["error"])


async def test_a_call_is_admitted_before_its_body_is_read(client: Any) -> None:
    del client.session.headers["Authorization"]
    reply = await client.post("/sum", data=b"no JSON")
    assert (reply.status, await reply.json()) == (401, {"error": "who?"})
    assert (await client.get(PATH)).status == 200


async def test_a_response_is_passed_on_as_it_is(client: Any) -> None:
    for name in "ab":
        reply = await client.get(f"/{name}/x/y")
        assert (reply.status, await reply.text()) == (203, "x/y")
    metrics = await client.get("/metrics")
    assert (metrics.content_type, await metrics.read()) == (TEXT, b"up 1\n")
    assert (await client.post("/never")).status == 400


async def test_the_document_has_the_declared_types_and_statuses(client: Any) -> None:
    document = await (await client.get(f"/base/1{PATH}")).json()
    assert document == msgspec.json.decode(msgspec.json.encode(client.app[DOCUMENT]))
    paths = document["paths"]
    assert set(paths) == {
        *("/sum", "/a/{id}", "/b/{id}", "/never", "/ignored", "/metrics", PATH),
    }
    adds = paths["/sum"]["post"]
    assert adds["requestBody"] == paths["/ignored"]["post"]["requestBody"]
    assert adds["responses"]["200"]["content"]["application/json"]["schema"] == {
        "type": "array",
        "items": {"type": "integer"},
    }
    assert set(adds["responses"]) == {"200", "400", "401", "403", "408", "413", "415"}
    assert set(paths["/a/{id}"]["get"]["responses"]) == {"200", "400", "415"}
    assert "200" not in paths["/never"]["post"]["responses"]
