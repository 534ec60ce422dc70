"""Routes of RoseMux's services, each declared once, for the application and its OpenAPI document:

    @Route("GET /v1/stops", "Orders to stop that are in force")
    async def stops(self) -> StopsInForce: ...

A handler's signature is part of the declaration. Its parameters are `request`, `body` and what the
service adds, each where it is needed: the body is decoded, and documented, as that type. It returns
a response, or what is sent as JSON; a route whose handler returns NoReturn is always refused.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import msgspec
from aiohttp import web

from harvester.platform.http_kit import SMALL_BODY_BYTES, decoded_body, json_reply

H = TypeVar("H", bound=Callable[..., Awaitable[Any]])
JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
_PATTERN = re.compile(":[^}]+}")
_RESPONSES = (web.Response, web.StreamResponse)
_DECLARED = "declared_routes"
_EXPOSITION: Final = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


class Callers(StrEnum):
    """Holders of tokens that may call a route, beside the operator; without tokens everyone may."""

    ANYONE = "anyone"
    TENANTS = "tenant"
    READERS = "tenant or observer"
    OBSERVERS = "operator or observer"
    OPERATOR = "operator"


class ErrorReply(msgspec.Struct, frozen=True):
    """OpenAI's routes and vLLM's answer `{"error": {"message": ...}}`."""

    error: str | dict[str, Any]


@dataclass(frozen=True)
class Route:
    operation: str
    """Method and path, as `GET /v1/slots`."""
    summary: str
    takes: Any = None
    """Type of a JSON body that the handler does not take as a parameter; None: no body is read."""
    answers: Any = None
    """Type of the JSON in a response; by default an object."""
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
    callers: Callers = Callers.TENANTS
    body_bytes: int | None = SMALL_BODY_BYTES
    """Bound on the handler's `body`; None: the application's."""
    empty: bytes = b""
    """Stands for an empty body."""
    handler: Any = None
    """The bound method; None until `routes_of` knows its object."""

    def __call__(self, handler: H) -> H:
        vars(handler).setdefault(_DECLARED, []).append(self)
        return handler

    @property
    def method(self) -> str:
        return self.operation.partition(" ")[0]

    @property
    def path(self) -> str:
        """The path without the patterns that its parts have to match."""
        return _PATTERN.sub("}", self.operation.partition(" ")[2])

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.handler)

    @property
    def body(self) -> Any:
        """Type of the JSON body; None: no body, or it is not read."""
        parameter = self.signature.parameters.get("body")
        return self.takes if parameter is None else parameter.annotation

    @property
    def reply(self) -> Any:
        """Type of the JSON reply; None: the call is always refused."""
        returned = self.signature.return_annotation
        if returned is NoReturn:
            return None
        return self.answers or (dict[str, Any] if returned in _RESPONSES else returned)

    def definition(self, base: str = "", admit: "Admission | None" = None) -> web.RouteDef:
        """An application's route, below the path `base`. `admit` runs before the body is read."""
        names, kind = tuple(self.signature.parameters), self.body
        # An object that has no type of its own is called by its name.
        name = "" if isinstance(kind, type) else "body"

        async def serve(request: web.Request) -> web.StreamResponse:
            given = {"request": request} | (admit(request, self) if admit else {})
            if "body" in names:
                given["body"] = await decoded_body(
                    request, kind, most_bytes=self.body_bytes, empty=self.empty, name=name
                )
            reply = await self.handler(**{each: given[each] for each in names})
            return reply if isinstance(reply, web.StreamResponse) else json_reply(reply)

        return web.route(self.method, base + self.operation.partition(" ")[2], serve)


Admission: TypeAlias = Callable[[web.Request, Route], dict[str, Any]]
"""Raises for a call that a service refuses; else returns what its handlers may take."""


def routes_of(*owners: object) -> list[Route]:
    """The routes that are declared at methods of these objects."""
    return [
        replace(route, handler=getattr(owner, name))
        for owner in owners
        for name, method in vars(type(owner)).items()
        for route in getattr(method, _DECLARED, ())
    ]


def several(routes: Iterable[Route]) -> Callable[[H], H]:
    """All of them for one handler."""

    def declare(handler: H) -> H:
        for route in routes:
            route(handler)
        return handler

    return declare


def metrics_route(render: Callable[[], bytes], *, callers: Callers = Callers.TENANTS) -> Route:
    async def metrics() -> web.Response:
        return web.Response(body=render(), headers=_EXPOSITION)

    return Route("GET /metrics", "Prometheus text", kinds=(TEXT,), callers=callers, handler=metrics)
