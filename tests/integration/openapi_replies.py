"""Holds replies of a gateway to its OpenAPI document."""

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec

from harvester.contracts.clock import MonotonicClock
from harvester.platform import openapi_document
from harvester.platform.tenants import Tenants
from scheduler.gateway.gateway import Gateway
from scheduler.gateway.job_paths import JOB_BASE
from scheduler.gateway.settings import GatewaySettings

SETTINGS = GatewaySettings.model_validate({"jobs": [{"id": "j"}], "engines": [{"id": "e"}]})
NOBODY: Any = SimpleNamespace(renderer=None)
APPLICATION = Gateway(NOBODY, SETTINGS, Tenants.load(None), MonotonicClock()).app
DOCUMENT: dict[str, Any] = msgspec.json.decode(
    msgspec.json.encode(APPLICATION[openapi_document.DOCUMENT])
)


def operation_of(method: str, path: str) -> tuple[str, str]:
    """The document's path that the request's path is an instance of, and its method."""
    asked = re.sub("^" + _any(JOB_BASE), "", path.partition("?")[0], count=1)
    for template in DOCUMENT["paths"]:
        if re.fullmatch(_any(template), asked):
            return template, method.lower()
    raise AssertionError(f"{asked} is not in the document")


def _any(template: str) -> str:
    return re.sub(r"{\w+}", "[^/]+", template)


@cache
def _validator(template: str, method: str, status: str) -> Any:
    answers = DOCUMENT["paths"][template][method]["responses"]
    assert status in answers, f"{method} {template} answers {status}, which the document has not"
    content = answers[status]["content"]
    schema = {**content["application/json"]["schema"], "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(schema)


def check_reply(method: str, path: str, status: int, reply: Any) -> None:
    """Raises ValidationError for a JSON reply that the document does not describe."""
    _validator(*operation_of(method, path), str(status)).validate(reply)
