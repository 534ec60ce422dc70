"""OpenAPI documents of RoseMux's services, from the types that their handlers decode and encode.

GET /openapi.json answers each. Tests compare its routes with those that are served, and replies
with their statuses and schemas.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from harvester.distribution import rosemux_version
from harvester.platform.http_kit import json_reply

PATH = "/openapi.json"
JSON, TEXT = "application/json", "text/plain"
FAILURES: Mapping[int, str] = {
    206: "the part that Range names",
    304: "the caller has it already",
    400: "malformed, a wrong name, or a field that the message names",
    401: "no token, or none that is known",
    403: "the token's holder may not do this",
    404: "no such thing",
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
    503: "not now",
}
"""Every status beside 200 that a route of a service answers."""
_ANY_ROUTE = (415,)
_WITH_BODY = (400, 408, 413)
_SCHEMAS = "#/components/schemas/{name}"
_ID = str.maketrans({" ": None, "/": "_", "{": None, "}": None, ".": "_"})

Parameter: TypeAlias = tuple[str, str]
"""Place (`path`, `query` or `header`) and name."""


class ErrorReply(msgspec.Struct, frozen=True):
    """OpenAI's routes and vLLM's answer `{"error": {"message": ...}}`."""

    error: str | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    summary: str
    takes: Any = None
    """Type of the JSON body; None: no body, or it is not read."""
    answers: Any = dict[str, Any]
    """Type of the reply; None: the call is always refused."""
    kinds: tuple[str, ...] = (JSON,)
    """Content types of the answer; none: it has no body."""
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    refuses: tuple[int, ...] = ()
    """Statuses beside 200 that are this route's own; others come with a body, a name in the path
    and the service."""
    fails: tuple[str, ...] = (JSON,)
    """Content types of the route's own refusals."""
    repeats: Any = ErrorReply
    """Type of a 408: an ErrorReply, unless it is an answer to a call that is to be repeated."""


def document(
    title: str,
    operations: Mapping[str, Operation],
    *,
    parameters: Callable[[str, Operation], Iterable[Parameter]] = lambda _path, _operation: (),
    refuses: Callable[[str], Iterable[int]] = lambda _name: (),
    retried: Collection[int] = (),
    servers: tuple[dict[str, Any], ...] = ({"url": "/"},),
) -> dict[str, Any]:
    """As OpenAPI 3.1. `operations` by `METHOD /path`; `parameters` beside its own, and `refuses`,
    which has the statuses that the service answers on that route by itself. Replies of a `retried`
    status say when to try again."""
    kinds = [
        kind for each in operations.values() for kind in (each.takes, each.answers, each.repeats)
    ]
    known = [kind for kind in kinds if kind is not None]
    schemas, components = msgspec.json.schema_components(
        [ErrorReply, *known], ref_template=_SCHEMAS
    )
    error, shown = schemas[0], iter(schemas[1:])
    paths: dict[str, dict[str, Any]] = {}
    for name, operation in operations.items():
        method, path = name.split(" ")
        takes = None if operation.takes is None else next(shown)
        answers = None if operation.answers is None else next(shown)
        repeats = next(shown)
        body = {} if takes is None else {"requestBody": {"content": {JSON: {"schema": takes}}}}
        refused = operation.answers is None
        answered = {} if refused else {"200": _response(answers, operation.kinds)}
        for status in sorted({*_refusals(path, operation), *refuses(name)}):
            failed = _response(
                repeats if status == 408 else error,
                _kinds(status, operation),
                FAILURES[status],
            )
            answered[str(status)] = failed | (_RETRIED if status in retried else {})
        given = [*_own_parameters(path, operation), *parameters(path, operation)]
        paths.setdefault(path, {})[method.lower()] = {
            "summary": operation.summary,
            "operationId": name.lower().translate(_ID),
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


def openapi_route(shown: dict[str, Any]) -> web.RouteDef:
    async def show(_request: web.Request) -> web.Response:
        return json_reply(shown)

    return web.get(PATH, show)


def _response(
    schema: Any, kinds: tuple[str, ...], words: str = "see docs/protocol.md"
) -> dict[str, Any]:
    content = {kind: {"schema": schema if kind == JSON else {"type": "string"}} for kind in kinds}
    return {"description": words, "content": content}


def _kinds(status: int, operation: Operation) -> tuple[str, ...]:
    """Content types of another status than 200: a part has the whole's, 304 has no body."""
    own = operation.fails if status in operation.refuses else (JSON,)
    return {206: operation.kinds, 304: ()}.get(status, own)


_RETRIED = {
    "headers": {"Retry-After": {"description": "in s", "schema": {"type": "integer"}}},
}


def _refusals(path: str, operation: Operation) -> set[int]:
    named = (400,) if "{" in path else ()
    read = () if operation.takes is None else _WITH_BODY
    return {*_ANY_ROUTE, *named, *read, *operation.refuses}


def _own_parameters(path: str, operation: Operation) -> list[Parameter]:
    parts = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    places = {"path": parts, "query": operation.query, "header": operation.headers}
    return [(place, name) for place, names in places.items() for name in names]


def _parameter(place: str, name: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
