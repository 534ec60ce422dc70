"""The documents of agent and phase control name what they serve."""

from io import BytesIO
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec
import pytest
from aiohttp import ClientSession, web

from harvester.agent.http import application as agent
from harvester.platform.http_kit import listen, serving
from harvester.platform.openapi_document import DOCUMENT, FAILURES, PATH
from harvester.platform.route_table import JSON, TEXT
from harvester.platform.tenants import Tenants
from scheduler.rollmux.control.socket_server import application as phases
from scheduler.rollmux.control.wire import CALLS

NOBODY: Any = SimpleNamespace(
    service=SimpleNamespace(metrics=None), owners=SimpleNamespace(tenants=Tenants())
)
AGENT, PHASES = (each(NOBODY)[DOCUMENT]["paths"] for each in (agent, phases))


def _served(app: web.Application) -> set[str]:
    return {
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


def _shown(paths: dict[str, dict[str, Any]]) -> set[str]:
    return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


def test_every_route_of_the_agent_is_in_its_document_and_no_other() -> None:
    assert _served(agent(NOBODY)) == _shown(AGENT)


def test_every_call_of_the_phase_control_is_in_its_document_and_no_other() -> None:
    assert {f"POST /v1/phases/{name}" for name in CALLS} <= _shown(PHASES)
    # Calls that there are not are refused by the handler of those that there are.
    assert _served(phases(NOBODY)) == _shown(PHASES) | {"POST /v1/phases/{call}"}


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
    for application, path, paths in (
        (agent, "/v1/leases", AGENT),
        (phases, "/v1/phases/enter", PHASES),
    ):
        async with serving(application(NOBODY)) as runner:
            url = await listen(runner, "127.0.0.1", 0, remedy="")
            sent = BytesIO(b" " * ((1 << 20) + 1))
            async with ClientSession() as session, session.post(url + path, data=sent) as reply:
                assert (reply.status, list(await reply.json())) == (413, ["error"])
        assert "413" in paths[path]["post"]["responses"]


def test_every_operation_names_its_statuses_and_no_other() -> None:
    for methods in (*AGENT.values(), *PHASES.values()):
        for operation in methods.values():
            statuses = set(operation["responses"])
            assert {"200", "415"} <= statuses <= {"200", *map(str, FAILURES)}
    probe = AGENT["/healthz"]["get"]["responses"]
    kinds = {status: list(answer["content"]) for status, answer in probe.items()}
    assert kinds == {"200": [TEXT], "415": [JSON], "503": [TEXT]}


def test_all_but_probes_need_a_token_and_all_but_reading_one_that_does_not_observe() -> None:
    for path, methods in AGENT.items():
        for method, operation in methods.items():
            refused = {"401", "403"} & set(operation["responses"])
            reads = set() if path in ("/healthz", "/readyz") else {"401"}
            assert refused == (reads if method == "get" else {"401", "403"})


@pytest.mark.parametrize("application", [agent, phases])
def test_every_reference_of_a_document_leads_to_a_valid_schema(application: Any) -> None:
    shown = msgspec.json.decode(msgspec.json.encode(application(NOBODY)[DOCUMENT]))
    known = shown["components"]["schemas"]
    for part in msgspec.json.encode(shown).decode().split('"$ref":"')[1:]:
        assert part.split('"')[0].removeprefix("#/components/schemas/") in known
    for schema in known.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert PATH in shown["paths"]
