"""OpenAPI documents of RoseMux's services, from the types that their handlers decode and encode.

GET /openapi.json answers each. Tests compare replies with its statuses and schemas.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from aiohttp import web

from harvester.distribution import rosemux_version
from harvester.platform.route_table import EVENTS, JSON, Admission, Callers, ErrorReply, Route

PATH = "/openapi.json"
FAILURES: Mapping[int, str] = {
    206: "the part that Range names",
    304: "the caller has it already",
    400: "malformed, a wrong name, or a field that the message names",
    401: "no token, or none that is known",
    403: "the token's holder may not do this",
    404: "unknown route, job, store or id",
    408: "the body was not whole in time",
    409: "overtaken: an older version, another request of the same id, another's service, or other "
    "content than was published",
    410: "gone for good",
    413: "the body is too long",
    415: "a Content-Encoding other than identity",
    416: "no such part",
    422: "not served to anyone: the message says why",
    429: "more waits than may be held",
    502: "malformed reply of an engine",
    503: "temporarily unavailable; retry later",
    504: "an engine that does not answer",
}
"""Every status beside 200 that a route of a service answers."""
_ANY_ROUTE = (415,)
_WITH_BODY = (400, 408, 413)
_SCHEMAS = "#/components/schemas/{name}"
_ID = str.maketrans({" ": None, "/": "_", "{": None, "}": None, ".": "_"})

Parameter: TypeAlias = tuple[str, str]
"""Place (`path`, `query` or `header`) and name."""
DOCUMENT: Final[web.AppKey[dict[str, Any]]] = web.AppKey("document")


def serve_routes(
    app: web.Application,
    title: str,
    routes: Iterable[Route],
    *,
    bases: tuple[str, ...] = ("",),
    admit: Admission | None = None,
    readers: Callers = Callers.READERS,
    **shown: Any,
) -> None:
    """Serves the routes below each of the `bases`, and GET /openapi.json to `readers`: the document
    that `shown` completes."""

    async def show() -> dict[str, Any]:
        return app[DOCUMENT]

    own = Route(f"GET {PATH}", "This document", callers=readers, handler=show)
    every = [*routes, own]
    app[DOCUMENT] = document(title, every, **shown)
    app.add_routes([each.definition(base, admit) for base in bases for each in every])


def document(
    title: str,
    routes: Sequence[Route],
    *,
    parameters: Callable[[Route], Iterable[Parameter]] = lambda _route: (),
    refuses: Callable[[Route], Iterable[int]] = lambda _route: (401, 403),
    retried: Collection[int] = (),
    servers: tuple[dict[str, Any], ...] = ({"url": "/"},),
) -> dict[str, Any]:
    """The routes in OpenAPI 3.1. `parameters`: besides a route's own; `refuses`: statuses of the
    service itself. Replies of a `retried` status say when to try again."""
    kinds = [kind for each in routes for kind in (each.body, each.reply, each.repeats)]
    known = [kind for kind in kinds if kind is not None]
    schemas, components = msgspec.json.schema_components(
        [ErrorReply, *known], ref_template=_SCHEMAS
    )
    error, shown = schemas[0], iter(schemas[1:])
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        takes = None if route.body is None else next(shown)
        answers = None if route.reply is None else next(shown)
        repeats = next(shown)
        body = {} if takes is None else {"requestBody": {"content": {JSON: {"schema": takes}}}}
        answered = {} if answers is None else {"200": _response(answers, route.kinds)}
        known_callers = () if route.callers is Callers.ANYONE else refuses(route)
        for status in sorted({*_refusals(route), *known_callers}):
            failed = _response(
                repeats if status == 408 else error, _kinds(status, route), FAILURES[status]
            )
            answered[str(status)] = failed | (_RETRIED if status in retried else {})
        given = [*_own_parameters(route), *parameters(route)]
        paths.setdefault(route.path, {})[route.method.lower()] = {
            "summary": route.summary,
            "operationId": f"{route.method}{route.path}".lower().translate(_ID),
            "parameters": [_parameter(*each) for each in given],
            **body,
            "responses": answered,
        }
    return {
        "openapi": "3.1.0",
        "servers": list(servers),
        "info": {"title": f"RoseMux {title}", "version": rosemux_version()},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _response(
    schema: Any, kinds: tuple[str, ...], words: str = "see docs/protocol.md"
) -> dict[str, Any]:
    # A stream of events is no string to a reader of the document, and OpenAPI 3.1 has no schema for
    # one event.
    described = {JSON: {"schema": schema}, EVENTS: {}}
    content = {kind: described.get(kind, {"schema": {"type": "string"}}) for kind in kinds}
    return {"description": words, "content": content}


def _kinds(status: int, route: Route) -> tuple[str, ...]:
    """Content types of another status than 200: a part has the whole's, 304 has no body."""
    own = route.fails if status in route.refuses else (JSON,)
    return {206: route.kinds, 304: ()}.get(status, own)


_RETRIED = {
    "headers": {"Retry-After": {"description": "in s", "schema": {"type": "integer"}}},
}


def _refusals(route: Route) -> set[int]:
    named = (400,) if "{" in route.path else ()
    read = () if route.body is None else _WITH_BODY
    return {*_ANY_ROUTE, *named, *read, *route.refuses}


def _own_parameters(route: Route) -> list[Parameter]:
    parts = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    places = {"path": parts, "query": route.query, "header": route.headers}
    return [(place, name) for place, names in places.items() for name in names]


def _parameter(place: str, name: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
