"""vLLM's own requests, of every supported version, at the gateway; its replies by their models.

The goldens are written by tests/compat/wire_models.py from the versions' wheels.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from coserve.vllm.capabilities import SUPPORTED
from scheduler.gateway.dialects.text_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    OWN_FIELDS,
    REFUSED_FIELDS,
    UNUSED_FIELDS,
)
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import GatewayInProcess, gateway_on

_GOLDENS: dict[str, Any] = json.loads((Path(__file__).parent / "vllm_wire.json").read_text())
VERSIONS: dict[str, dict[str, int]] = _GOLDENS["versions"]
DUMPS = ("defaults", "without_none", "carried")


def golden(version: str, name: str) -> dict[str, Any]:
    value: dict[str, Any] = _GOLDENS["values"][VERSIONS[version][name]]
    return value


@pytest.fixture
async def gateway() -> AsyncIterator[GatewayInProcess]:
    engine = FakeEngine(step_s=0.0, epoch=None, context=24)
    engine.masks = engine.routes_experts = True
    async with gateway_on(engine) as gateway:
        await gateway.until(lambda: gateway.scheduler.registry.context_tokens() == 24)
        yield gateway


def test_there_are_goldens_of_every_supported_version() -> None:
    assert VERSIONS.keys() == SUPPORTED.keys()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dump", DUMPS)
async def test_takes_what_vllms_models_dump_and_replies_what_they_read(
    gateway: GatewayInProcess, version: str, dump: str
) -> None:
    body = golden(version, dump) | {"return_token_ids": True}
    choices = body["sampling_params"].get("n", 1)

    status, reply = await gateway.post("/inference/v1/generate", body)

    assert status == 200, reply
    jsonschema.Draft202012Validator(golden(version, "GenerateResponse")).validate(reply)
    # Without `max_tokens` vLLM fills the context.
    tokens = body["sampling_params"].get("max_tokens", 24 - 2)
    assert [len(choice["token_ids"]) for choice in reply["choices"]] == [tokens] * choices
    assert reply["usage"]["prompt_tokens"] == 2
    assert reply["prompt_token_ids"] == [1, 2]
    assert ("prompt_logprobs" in reply) == (dump == "carried")
    for choice in reply["choices"]:
        ranges = [(each["start"], each["end"]) for each in choice["weight_versions"]]
        assert ranges == [(0, tokens)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dump", DUMPS)
async def test_streams_what_vllms_models_read(
    gateway: GatewayInProcess, version: str, dump: str
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = golden(version, dump) | {"stream": True, "stream_options": options}
    validator = jsonschema.Draft202012Validator(golden(version, "GenerateStreamResponse"))

    async with aiohttp.ClientSession() as session:
        url = gateway.url + "/inference/v1/generate"
        async with session.post(url, json=body | {"return_token_ids": True}) as response:
            raw = (await response.read()).decode()
    *events, done = [each.removeprefix("data: ") for each in raw.strip().split("\n\n")]

    assert (response.status, done) == (200, "[DONE]")
    replies = [json.loads(event) for event in events]
    for reply in replies:
        validator.validate(reply)
    assert [bool(reply.get("usage")) for reply in replies] == [True] * len(replies)
    first = next(reply for reply in replies if reply["choices"][0]["index"] == 0)
    assert first["prompt_token_ids"] == [1, 2]
    assert sum("prompt_token_ids" in reply for reply in replies) == 1


@pytest.mark.parametrize(
    ("model", "rendered"),
    [("ChatCompletionRequest", CHAT_FIELDS), ("CompletionRequest", COMPLETION_FIELDS)],
)
def test_each_field_of_openais_requests_is_carried_or_refused_by_name(
    model: str, rendered: frozenset[str]
) -> None:
    known = set().union(*(golden(version, model) for version in VERSIONS))
    assert known <= rendered | OWN_FIELDS | UNUSED_FIELDS | REFUSED_FIELDS.keys()
    # `best_of` has an error of its own.
    assert rendered - {"best_of"} <= known, "a field that no vLLM reads would be taken"
