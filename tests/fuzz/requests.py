"""A service's OpenAPI document, narrowed to requests that its handlers serve, and what they served.

From a document alone nearly every request is refused for a name that does not exist. Schemas of
bodies are therefore narrowed to a body that is served (fields beside its own stay as documented),
and parameters to known values. schemathesis makes the wrong requests by itself.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class KnownRequests:
    bodies: dict[str, Any] = field(default_factory=dict)
    """A body that is served, by path."""
    parameters: dict[str, list[Any]] = field(default_factory=dict)
    """Values with which a request is served, by name."""
    refused: frozenset[str] = frozenset()
    """Method and path of operations that this service always refuses, though others serve them."""

    def narrow(self, document: dict[str, Any]) -> None:
        schemas = document["components"]["schemas"]
        for path, methods in document["paths"].items():
            for operation in methods.values():
                for parameter in operation["parameters"]:
                    if known := self.parameters.get(parameter["name"]):
                        parameter["schema"]["enum"] = known
                        parameter["example"] = known[0]
                if "requestBody" in operation and path in self.bodies:
                    body, example = operation["requestBody"]["content"][JSON], self.bodies[path]
                    body["schema"] = _like(example, body["schema"], schemas)
                    body["example"] = example


def _like(example: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(example, dict):
        return {"enum": [example]}
    whole = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    known = whole.get("properties", {})
    narrowed = {name: _like(each, known.get(name, {}), schemas) for name, each in example.items()}
    required = sorted({*whole.get("required", ()), *example})
    return {"type": "object"} | whole | {"properties": known | narrowed, "required": required}


class ServedRequests:
    """Counts the requests of each operation that were served."""

    def __init__(self) -> None:
        self._served: Counter[str] = Counter()

    def watch(self, app: web.Application) -> None:
        app.middlewares.append(self._count)

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        if resource is not None and response.status < 300 and not _refuses(response):
            self._served[f"{request.method} {resource.canonical}"] += 1
        return response

    def missing(self, document: Mapping[str, Any]) -> set[str]:
        """Operations that have a reply of status 200, and never gave it."""
        return {
            operation
            for path, methods in document["paths"].items()
            for method, described in methods.items()
            if "200" in described["responses"]
            and not self._served[operation := f"{method.upper()} {path}"]
        }


def _refuses(response: web.StreamResponse) -> bool:
    """Whether a reply of status 200 is tagged as a refusal."""
    if not isinstance(response, web.Response) or not isinstance(response.body, bytes):
        return False
    try:
        reply = msgspec.json.decode(response.body)
    except msgspec.DecodeError:
        return False
    return isinstance(reply, dict) and reply.get("type") == "refused"
