"""Tinker's sampling routes over fake engines, as its client calls them."""

import math
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from scheduler.gateway.dialects import tinker_routes
from tests.integration.fake_engine import VOCABULARY, FakeEngine
from tests.integration.gateway_in_process import GatewayInProcess, continued, gateway_on

PROMPT = [4, 5, 6]


class Tinker:
    def __init__(
        self, gateway: GatewayInProcess, session: aiohttp.ClientSession, engine: FakeEngine
    ) -> None:
        self.gateway = gateway
        self.engine = engine
        self._session = session

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        url = f"{self.gateway.url}/api/v1/{path}"
        async with self._session.post(url, json=body) as response:
            if response.content_type == "application/x-protobuf":
                return response.status, await response.read()
            return response.status, await response.json()

    async def sampler(self, **model: str) -> tuple[int, Any]:
        _, session = await self.post("create_session", {"tags": [], "sdk_version": "0"})
        body = {"session_id": session["session_id"], "sampling_session_seq_id": 0} | model
        status, reply = await self.post("create_sampling_session", body)
        return status, reply.get("sampling_session_id") or reply

    async def begin(self, sampler: str, number: int, **more: Any) -> tuple[int, Any]:
        body = {
            "sampling_session_id": sampler,
            "seq_id": number,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            "sampling_params": {"max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
            "topk_sample_logprobs": 0,
            "type": "sample",
        }
        return await self.post("asample", body | more)


@asynccontextmanager
async def tinker(*, step_s: float = 0.001, **settings: Any) -> AsyncIterator[Tinker]:
    engine = FakeEngine(step_s=step_s, epoch=None)
    async with gateway_on(engine, **settings) as gateway, aiohttp.ClientSession() as session:
        yield Tinker(gateway, session, engine)


def sequence(token_ids: list[int], content: list[dict[str, Any]]) -> bytes:
    """Tinker's `SampleResponse` with one sequence that ended at its length."""
    tokens = struct.pack(f"<{len(token_ids)}i", *token_ids)
    logprobs = struct.pack(f"<{len(content)}f", *[each["logprob"] for each in content])
    inner = b"\x08\x01\x12" + bytes([len(tokens)]) + tokens + b"\x1a" + bytes([len(logprobs)])
    inner += logprobs
    return b"\x0a" + bytes([len(inner)]) + inner


async def test_a_promise_is_kept_as_the_protobuf_of_its_samples() -> None:
    async with tinker() as client:
        _, sampler = await client.sampler(base_model="job")
        status, promise = await client.begin(sampler, 0, num_samples=2)
        assert status == 200
        assert len(set(promise["sample_sequence_ids"])) == 2
        status, reply = await client.post("retrieve_future", {"request_id": promise["request_id"]})
        _, choice = await client.gateway.generate("same", 3)
    assert choice["token_ids"] == continued(PROMPT, 3, version=0)
    wanted = sequence(choice["token_ids"], choice["logprobs"]["content"])
    assert (status, reply) == (200, wanted * 2)


async def test_the_likeliest_tokens_come_with_each_sampled_one() -> None:
    async with tinker() as client:
        _, sampler = await client.sampler(base_model="job")
        _, promise = await client.begin(sampler, 0, topk_sample_logprobs=1)
        _, reply = await client.post("retrieve_future", {"request_id": promise["request_id"]})
        refused, why = await client.begin(sampler, 1, topk_sample_logprobs=20)
    # Token 0 is the likeliest at each place, with a log-probability of 0.
    best = b"\x0a\x0c" + bytes(12) + b"\x12\x0c" + bytes(12) + b"\x18\x01\x20\x03"
    assert reply.endswith(b"\x22\x20" + best)
    assert refused == 400
    assert "topk_sample_logprobs: send one number, at most 19" in str(why)


async def test_a_prompt_s_log_probabilities_come_beside_its_samples() -> None:
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "num_samples": 2}
    async with tinker() as client:
        _, sampler = await client.sampler(base_model="job")
        _, promise = await client.begin(sampler, 0, **asked)
        _, reply = await client.post("retrieve_future", {"request_id": promise["request_id"]})
    scores = [-each / VOCABULARY for each in PROMPT[1:]]
    own = struct.pack("<3f", math.nan, *scores)
    tokens = struct.pack("<6i", 0, 0, PROMPT[1], 0, PROMPT[2], 0)
    none = -99999.0
    logprobs = struct.pack("<6f", none, none, scores[0], none, scores[1], none)
    inner = b"\x0a\x18" + tokens + b"\x12\x18" + logprobs + b"\x18\x02\x20\x03"
    assert reply.endswith(b"\x12\x0c" + own + b"\x1a" + bytes([len(inner)]) + inner)
    assert reply.count(own) == 1, "once for all samples of a prompt"


async def test_a_sample_that_was_interrupted_goes_on_whatever_its_job_says() -> None:
    """Tinker's reply cannot say that a sample is partial, and one begun anew prefers short ones."""
    jobs = [{"id": "job", "on_interrupt": "return_partial"}]
    async with tinker(step_s=0.02, jobs=jobs) as client:
        await client.gateway.publish(1)
        _, sampler = await client.sampler(base_model="job")
        long = {"sampling_params": {"max_tokens": 40}}
        _, promise = await client.begin(sampler, 0, **long)
        await client.gateway.until_tokens(5)
        await client.gateway.publish(2)
        _, reply = await client.post("retrieve_future", {"request_id": promise["request_id"]})
        counted = (await client.gateway.status())["jobs"]["job"]["turns"]
    begun = struct.pack("<5i", *continued(PROMPT, 5, version=1))
    assert begun in reply
    assert b"\x08\x01" in reply[:8], "it ends at its length"
    assert counted["started"] == 1


async def test_a_repeated_request_joins_its_promise() -> None:
    async with tinker(step_s=0.02) as client:
        _, sampler = await client.sampler(base_model="job")
        _, promise = await client.begin(sampler, 0)
        assert await client.begin(sampler, 0) == (200, promise)
        await client.post("retrieve_future", {"request_id": promise["request_id"]})
        counted = (await client.gateway.status())["jobs"]["job"]["turns"]
    assert counted["started"] == 1


async def test_another_request_with_the_number_of_a_promise_is_refused() -> None:
    async with tinker() as client:
        _, sampler = await client.sampler(base_model="job")
        await client.begin(sampler, 0)
        for other in (
            {"prompt": {"chunks": [{"tokens": [9]}]}},
            {"sampling_params": {"max_tokens": 2}},
            {"topk_sample_logprobs": 1},
            {"prompt_logprobs": True},
        ):
            status, told = await client.begin(sampler, 0, **other)
            assert (status, "belongs to another request" in str(told)) == (409, True)


async def test_a_model_path_pins_its_version() -> None:
    async with tinker() as client:
        await client.gateway.publish(2)
        for version, status in ((2, 200), (1, 410)):
            _, sampler = await client.sampler(model_path=f"tinker://job/{version}")
            _, promise = await client.begin(sampler, 0)
            name = {"request_id": promise["request_id"]}
            got, reply = await client.post("retrieve_future", name)
            assert got == 200
            if status == 200:
                assert struct.pack("<3i", *continued(PROMPT, 3, version=2)) in reply
            else:
                assert reply["category"] == "user"
                assert "1" in reply["error"]


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("prompt_logprobs_last_n", {"prompt_logprobs": True, "prompt_logprobs_last_n": 1}),
        ("topk_prompt_logprobs", {"topk_prompt_logprobs": "x"}),
        ("prompt", {"prompt": {"chunks": [{"type": "image", "data": ""}]}}),
        ("sampling_session_id", {"sampling_session_id": "of another gateway"}),
        ("token_ids", {"prompt": {"chunks": []}}),
    ],
)
async def test_a_field_that_is_not_offered_is_refused_by_name(
    field: str, more: dict[str, Any]
) -> None:
    async with tinker() as client:
        _, sampler = await client.sampler(base_model="job")
        status, reply = await client.begin(sampler, 0, **more)
    assert status == 400
    assert field in reply["error"]


async def test_a_model_that_the_job_does_not_train_is_refused() -> None:
    async with tinker() as client:
        assert (await client.sampler(base_model="other"))[0] == 400
        assert (await client.sampler(model_path="tinker://other/1"))[0] == 400


async def test_a_running_promise_is_reported_as_such_and_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tinker_routes, "WAIT_S", 0.05)
    async with tinker(step_s=5.0) as client:
        _, sampler = await client.sampler(base_model="job")
        _, promise = await client.begin(sampler, 0)
        name = {"request_id": promise["request_id"]}
        assert await client.post("retrieve_future", name) == (408, {"queue_state": "active"})
        await client.post("cancel_future", name)
        status, reply = await client.post("retrieve_future", name)
    assert (status, reply["category"]) == (200, "user")


@pytest.mark.parametrize("path", ["create_sampling_session", "retrieve_future", "cancel_future"])
async def test_a_large_body_is_refused_where_no_prompt_is_sent(path: str) -> None:
    async with tinker() as client:
        status, reply = await client.post(path, {"request_id": "x" * (64 << 10)})
    assert (status, reply["error"]) == (413, "body of more than 65536 bytes")


async def test_a_failed_sample_begins_anew_when_it_is_requested_again() -> None:
    async with tinker() as client:
        await client.gateway.publish(2)
        engine = client.engine
        engine.answers[str(PROMPT[0])] = 400
        _, sampler = await client.sampler(base_model="job")
        _, promise = await client.begin(sampler, 0)
        name = {"request_id": promise["request_id"]}
        status, reply = await client.post("retrieve_future", name)
        assert (status, reply["category"]) == (200, "user")
        engine.answers.clear()
        assert await client.begin(sampler, 0) == (200, promise)
        status, reply = await client.post("retrieve_future", name)
        assert struct.pack("<3i", *continued(PROMPT, 3, version=2)) in reply


async def test_bodies_of_samples_count_until_their_turns_end_and_replies_until_they_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tinker(max_open_bytes=1024) as client:
        client.engine.running.clear()
        _, sampler = await client.sampler(base_model="job")
        long = {"sampling_params": {"max_tokens": 3, "stop": ["x" * 400]}}
        _, promise = await client.begin(sampler, 0, **long)
        status, reply = await client.begin(sampler, 1, **long)
        assert (status, "max_open_bytes" in reply["error"]) == (429, True)
        client.engine.running.set()
        name = {"request_id": promise["request_id"]}
        _, reply = await client.post("retrieve_future", name)
        assert (await client.begin(sampler, 1, **long))[0] == 200
        monkeypatch.setattr(tinker_routes, "ABANDONED_S", 0.01)
        await client.post("retrieve_future", name)
        await client.post("retrieve_future", {"request_id": f"{sampler}.1"})
        held = client.gateway.service.open_bodies
        await client.gateway.until(lambda: held.held == 0)


async def test_an_abandoned_promise_is_gone_and_its_turn_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tinker_routes, "ABANDONED_S", 0.01)
    monkeypatch.setattr(tinker_routes, "WAIT_S", 5.0)
    async with tinker(step_s=5.0) as client:
        _, sampler = await client.sampler(base_model="job")
        _, promise = await client.begin(sampler, 0)
        name = {"request_id": promise["request_id"]}
        await client.post("retrieve_future", name)
        assert (await client.post("retrieve_future", name))[0] == 410
