"""The job of a request at a gateway with several: by path, by header, or by the body's model."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, GatewayInProcess, gateway_on

GENERATE = "/inference/v1/generate"
JOBS = [{"id": "job", "active": True}, {"id": "other", "tenant": "lab"}]


def engine() -> FakeEngine:
    return FakeEngine(step_s=0.001, epoch=None)


def turn(**more: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}, **more}


async def chunked(gateway: GatewayInProcess, body: dict[str, Any]) -> tuple[int, Any]:
    """A POST of a body whose length is not known before."""

    async def parts() -> Any:
        yield json.dumps(body).encode()

    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(gateway.url + GENERATE, data=parts()) as reply,
    ):
        return reply.status, await reply.json()


async def test_the_model_chooses_the_job_that_has_its_name() -> None:
    async with gateway_on(engine(), jobs=JOBS, timeouts={"queue_s": 0.2}) as gateway:
        status, reply = await gateway.post(GENERATE, turn(model="job"))
        assert (status, reply["model"]) == (200, "job"), reply
        assert (await chunked(gateway, turn(model="job")))[0] == 200
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "model": "other"}
        status, reply = await gateway.post("/generate", body)
        assert (status, "other is not active" in reply["error"]) == (503, True), reply
        jobs = (await gateway.status())["jobs"]
    assert [jobs[job]["turns"]["started"] for job in ("job", "other")] == [2, 1]


async def test_a_path_or_a_header_goes_before_the_model() -> None:
    async with gateway_on(engine(), jobs=JOBS) as gateway:
        assert (await gateway.generate("r", 1, model="job"))[0] == 200, (
            "the engine's model is known"
        )
        for path, headers in (("/jobs/job", {}), ("", {"X-RoseMux-Job": "job"})):
            status, reply = await gateway.post(path + GENERATE, turn(model="other"), headers)
            assert (status, "not what job job trains" in reply["error"]["message"]) == (404, True)
            assert (await gateway.post(path + GENERATE, turn(model="fake"), headers))[0] == 200


@pytest.mark.parametrize(
    ("jobs", "model", "says"),
    [
        (JOBS, None, "this caller has several jobs: job, other"),
        (JOBS, "another", "'another' is neither a job of this caller nor a served model; this"),
        (JOBS, "another", "this caller has several jobs: job, other"),
        (JOBS, 7, "this caller has several jobs: job, other"),
        (JOBS, "fake", "this caller has several jobs: job, other"),
        ([*JOBS, {"id": "fake"}], "fake", "fake is a served model and a job"),
        ([*JOBS, {"id": "a", "adapter": "other"}], "other", "other is a served model and a job"),
    ],
)
async def test_a_model_that_names_no_job_or_also_a_served_model_chooses_none(
    jobs: list[dict[str, Any]], model: Any, says: str
) -> None:
    async with gateway_on(engine(), jobs=jobs) as gateway:
        assert (await gateway.generate("r", 1, model="job"))[0] == 200, (
            "the engine's model is known"
        )
        status, reply = await gateway.post(GENERATE, turn(model=model))
        assert (status, says in reply["error"]["message"]) == (400, True), reply
        assert (await gateway.post(GENERATE, turn(model=model), {"X-RoseMux-Job": "job"}))[0] != 503


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"x", "body: JSON is malformed"),
        (b"[]", "body: Expected `object`, got `array`"),
        (b'{"token_ids": [1], "sampling_params": {"temperature": NaN}}', "body: JSON is malformed"),
    ],
)
async def test_a_body_that_is_no_json_object_is_named_where_there_are_several_jobs(
    body: bytes, says: str
) -> None:
    async with gateway_on(engine(), jobs=JOBS) as gateway, aiohttp.ClientSession() as session:
        for path in (GENERATE, "/v1/completions", "/generate"):
            async with session.post(gateway.url + path, data=body) as reply:
                assert (reply.status, says in await reply.text()) == (400, True), path


async def test_an_activation_whose_body_is_no_json_is_refused() -> None:
    async with gateway_on(engine(), jobs=JOBS) as gateway, aiohttp.ClientSession() as session:
        url = f"{gateway.url}/v1/jobs/job/activate"
        for body, status in ((b"x", 400), (b"", 200), (b"{}", 200)):
            async with session.post(url, data=body) as reply:
                assert reply.status == status, body


async def test_a_tenant_s_model_chooses_none_of_another_tenant_s_jobs(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.touch(mode=0o600)
    tokens.write_text("lab: the-token-of-the-lab\n")
    mine = {"Authorization": "Bearer the-token-of-the-lab"}
    jobs = [*JOBS, {"id": "third", "tenant": "lab"}]
    async with gateway_on(engine(), jobs=jobs, tokens=tokens) as gateway:
        status, reply = await gateway.post(GENERATE, turn(model="job"), mine)
    assert (status, "this caller has several jobs: other, third" in str(reply)) == (400, True)


async def test_a_job_that_trains_an_adapter_does_not_serve_its_base() -> None:
    """The adapter would answer, and reference log-probabilities would be the policy's."""
    scored = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0}
    scored["sampling_params"] = {"max_new_tokens": 0}
    async with gateway_on(engine(), jobs=[{"id": "job", "adapter": "policy"}]) as gateway:
        status, _ = await gateway.generate("early", 2, model="another")
        await gateway.publish(1)
        _, listed = await gateway.get("/v1/models")
        for name in ("job", "policy"):
            assert (await gateway.generate(name, 2, model=name))[0] == 200
            assert (await gateway.post("/generate", scored | {"lora_path": name}))[0] == 200
        assert (await gateway.post("/generate", scored))[0] == 200
        refused, why = await gateway.generate("base", 2, model="fake")
        null, lora = await gateway.post("/generate", scored | {"lora_path": None})
    assert status == 404, "an engine to come changes nothing"
    assert [each["id"] for each in listed["data"]] == ["job", "policy"]
    assert refused == 404
    assert "'fake' is not the adapter that job job trains" in why["error"]["message"]
    assert (null, "serves its adapter, not the base" in lora["error"]) == (400, True)
