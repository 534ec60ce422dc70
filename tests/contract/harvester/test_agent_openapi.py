"""The documents of agent and phase control name what they serve."""

from typing import Any, cast

import jsonschema
import msgspec
import pytest
from aiohttp import web

from harvester.agent.http import application as agent
from harvester.agent.openapi import OPERATIONS as AGENT
from harvester.platform.openapi_document import PATH, Operation, document
from scheduler.rollmux.control.socket_server import OPERATIONS as PHASES
from scheduler.rollmux.control.socket_server import application as phases
from scheduler.rollmux.control.wire import CALLS

NOBODY: Any = cast(Any, type("Nobody", (), {"service": None})())


def _served(app: web.Application) -> set[str]:
    return {
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


def test_every_route_of_the_agent_is_in_its_document_and_no_other() -> None:
    assert _served(agent(NOBODY)) == set(AGENT)


def test_every_call_of_the_phase_control_is_in_its_document_and_no_other() -> None:
    calls = {f"POST /v1/phases/{name}" for name in CALLS}
    assert calls <= set(PHASES)
    assert _served(phases(NOBODY)) == set(PHASES) - calls | {"POST /v1/phases/{call}"}


@pytest.mark.parametrize("operations", [AGENT, PHASES])
def test_every_reference_of_a_document_leads_to_a_valid_schema(
    operations: dict[str, Operation],
) -> None:
    shown = msgspec.json.decode(msgspec.json.encode(document("x", operations)))
    known = shown["components"]["schemas"]
    for part in msgspec.json.encode(shown).decode().split('"$ref":"')[1:]:
        assert part.split('"')[0].removeprefix("#/components/schemas/") in known
    for schema in known.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert PATH in shown["paths"]
