"""The OpenAPI document names what the gateway serves."""

from pathlib import Path

import jsonschema
import msgspec
import pytest

from scheduler.gateway.job_paths import JOB_BASE
from tests.integration.openapi_replies import APPLICATION, DOCUMENT, check_reply


def test_every_route_is_in_the_document_and_no_other() -> None:
    shown = {
        f"{method.upper()} {path}"
        for path, methods in DOCUMENT["paths"].items()
        for method in methods
    }
    assert shown | {each.replace(" ", f" {JOB_BASE}", 1) for each in shown} == {
        f"{route.method} {route.resource.canonical}"
        for route in APPLICATION.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert [each["url"] for each in DOCUMENT["servers"]] == ["/", JOB_BASE]


def test_operations_have_names_of_their_own_and_every_reference_leads_somewhere() -> None:
    names = [each["operationId"] for path in DOCUMENT["paths"].values() for each in path.values()]
    assert len(set(names)) == len(names)
    text = msgspec.json.encode(DOCUMENT).decode()
    for part in text.split('"$ref":"')[1:]:
        reference = part.split('"')[0]
        assert reference.removeprefix("#/components/schemas/") in DOCUMENT["components"]["schemas"]


def test_schemas_are_those_of_the_wire_types() -> None:
    generate = DOCUMENT["paths"]["/inference/v1/generate"]["post"]
    body = generate["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/GenerateRequest"}
    status = DOCUMENT["paths"]["/v1/status"]["get"]["responses"]["200"]["content"]
    assert status["application/json"]["schema"] == {"$ref": "#/components/schemas/GatewayStatus"}
    known = DOCUMENT["components"]["schemas"]
    assert {"sampling_params", "token_ids"} <= set(known["GenerateRequest"]["required"])
    assert "on_interrupt" in known["GenerateRequest"]["properties"]
    for schema in known.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_a_reply_that_the_document_does_not_describe_is_found() -> None:
    check_reply("POST", "/abort_requests", 200, {"aborted": 1, "status": "aborted"})
    check_reply("POST", "/v1/jobs/a/versions", 409, {"error": "old"})
    for status, reply in ((200, {"aborted": "1"}), (400, {"detail": "x"})):
        with pytest.raises(jsonschema.ValidationError):
            check_reply("POST", "/abort_requests", status, reply)


def test_the_statuses_of_the_document_are_those_of_the_protocol() -> None:
    text = (Path(__file__).parents[4] / "docs/protocol/gateway-api.md").read_text()
    table = text.partition("| status | means | do |")[2].partition("\n\n")[0]
    written = {row.split("|")[1].strip() for row in table.splitlines()[2:]}
    shown = {
        status
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
        for status in operation["responses"]
    }
    assert shown - {"200"} == written


def test_replies_to_try_again_say_when() -> None:
    turn = DOCUMENT["paths"]["/inference/v1/generate"]["post"]["responses"]
    assert {"404", "409", "410", "413", "415", "422", "429", "503"} <= turn.keys()
    assert {status for status, each in turn.items() if "headers" in each} == {"409", "429", "503"}
    assert "429" not in DOCUMENT["paths"]["/v1/completions"]["post"]["responses"]
    assert "default" not in turn


def test_a_status_that_the_document_does_not_name_is_found() -> None:
    with pytest.raises(AssertionError, match="answers 410"):
        check_reply("POST", "/v1/jobs/a/versions", 410, {"error": "gone"})
