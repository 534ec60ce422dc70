"""The documents of agent and phase control name what they serve."""

from io import BytesIO
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec
import pytest
from aiohttp import ClientSession, web

from harvester.agent.http import application as agent
from harvester.agent.openapi import OPERATIONS as AGENT
from harvester.agent.openapi import refuses
from harvester.platform.http_kit import listen, serving
from harvester.platform.openapi_document import (
    FAILURES,
    JSON,
    PATH,
    TEXT,
    Operation,
    document,
)
from harvester.platform.tenants import Tenants
from scheduler.rollmux.control.socket_server import OPERATIONS as PHASES
from scheduler.rollmux.control.socket_server import application as phases
from scheduler.rollmux.control.wire import CALLS

NOBODY: Any = SimpleNamespace(service=None, owners=SimpleNamespace(tenants=Tenants()))


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


@pytest.mark.parametrize(("method", "path"), [("GET", "/metrics"), ("POST", "/v1/anything")])
@pytest.mark.parametrize("application", [agent, phases])
async def test_a_refusal_by_size_or_route_is_an_error_reply(
    application: Any, method: str, path: str
) -> None:
    """aiohttp's own are text, which clients of JSON cannot read."""
    headers = {"Content-Encoding": "gzip"} if method == "GET" else {}
    async with serving(application(NOBODY)) as runner:
        url = await listen(runner, "127.0.0.1", 0, remedy="")
        async with (
            ClientSession() as session,
            session.request(method, url + path, headers=headers) as reply,
        ):
            assert reply.status == (415 if headers else 404)
            assert (await reply.json())["error"]


async def test_a_body_over_the_limit_is_refused_as_the_documents_say() -> None:
    for application, path, operations in (
        (agent, "/v1/leases", AGENT),
        (phases, "/v1/phases/enter", PHASES),
    ):
        async with serving(application(NOBODY)) as runner:
            url = await listen(runner, "127.0.0.1", 0, remedy="")
            sent = BytesIO(b" " * ((1 << 20) + 1))
            async with ClientSession() as session, session.post(url + path, data=sent) as reply:
                assert (reply.status, list(await reply.json())) == (413, ["error"])
        assert "413" in document("x", operations)["paths"][path]["post"]["responses"]


def test_every_operation_names_its_statuses_and_no_other() -> None:
    for operations in (AGENT, PHASES):
        shown = document("agent", operations, refuses=refuses)["paths"]
        for name in operations:
            method, path = name.split(" ")
            statuses = set(shown[path][method.lower()]["responses"])
            assert {"200", "415"} <= statuses <= {"200", *map(str, FAILURES)}
    probe = document("agent", AGENT, refuses=refuses)["paths"]["/healthz"]["get"]["responses"]
    kinds = {status: list(answer["content"]) for status, answer in probe.items()}
    assert kinds == {"200": [TEXT], "415": [JSON], "503": [TEXT]}


def test_all_but_probes_need_a_token_and_all_but_reading_one_that_does_not_observe() -> None:
    for path, methods in document("agent", AGENT, refuses=refuses)["paths"].items():
        for method, operation in methods.items():
            refused = {"401", "403"} & set(operation["responses"])
            reads = set() if path in ("/healthz", "/readyz") else {"401"}
            assert refused == (reads if method == "get" else {"401", "403"})


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
