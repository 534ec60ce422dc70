"""A whole answer that its client did not receive is given again, and never to another request."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, GatewayInProcess, continued, gateway_on

NATIVE = "/inference/v1/generate"


def fake() -> FakeEngine:
    return FakeEngine(step_s=0.001, epoch=None)


def body(name: str, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 20, "temperature": 1.0, **more.pop("sampling", {})}
    return {"request_id": name, "token_ids": PROMPT, "sampling_params": sampling, **more}


async def raw(
    gateway: GatewayInProcess, sent: dict[str, Any], headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(gateway.url + NATIVE, json=sent) as reply,
    ):
        return reply.status, await reply.read()


def streamed(raw_events: bytes) -> dict[str, Any]:
    """The choice that a stream's events make together."""
    events = [line[6:] for line in raw_events.split(b"\n\n") if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    logprobs = [each for choice in choices for each in choice["logprobs"]["content"]]
    token_ids = [token for choice in choices for token in choice["token_ids"]]
    return choices[-1] | {"token_ids": token_ids, "logprobs": {"content": logprobs}}


@pytest.mark.parametrize("samples", [1, 3])
async def test_the_same_request_again_gets_the_same_bytes(samples: int) -> None:
    engine = fake()
    async with gateway_on(engine) as gateway:
        sent = body("r", sampling={"n": samples, "seed": 1}, return_token_ids=True)
        first, again = await raw(gateway, sent), await raw(gateway, sent)
        assert first[0] == 200
        assert again == first
        assert len(engine.models) == samples, "sampled once"
        assert gateway.scheduler.ledgers["job"].counters.repeated == samples


async def test_a_request_with_the_name_of_another_one_s_sample_gets_no_copy_of_it() -> None:
    """The copy would be trained on as a sample of its own."""
    engine = fake()
    async with gateway_on(engine) as gateway:
        group, alone = body("g", sampling={"n": 2}), body("g.0")
        first = await raw(gateway, group)
        status, reply = await raw(gateway, alone)
        assert (status, b"'g.0' was answered with another body" in reply) == (409, True)
        engine.running.clear()
        opened = asyncio.create_task(raw(gateway, body("h", sampling={"n": 2})))
        await gateway.until(lambda: engine.open == 2)
        assert (await raw(gateway, body("h.1")))[0] == 409
        engine.running.set()
        assert (await opened)[0] == 200
        assert await raw(gateway, group) == first, "the group's own repetition joins"


@pytest.mark.parametrize("first_streams", [True, False])
async def test_a_stream_that_breaks_when_all_was_sampled_is_given_again_in_either_form(
    first_streams: bool,
) -> None:
    engine = fake()
    async with gateway_on(engine, timeouts={"rejoin_s": 0.01}) as gateway:
        async with (
            aiohttp.ClientSession() as session,
            session.post(gateway.url + NATIVE, json=body("r", stream=first_streams)) as reply,
        ):
            await gateway.until(lambda: gateway.scheduler.ledgers["job"].counters.completed)
            reply.close()
        _, plain = await raw(gateway, body("r"))
        _, events = await raw(gateway, body("r", stream=True))
        (choice,) = json.loads(plain)["choices"]
        assert choice["token_ids"] == continued(PROMPT, 20, version=0)
        assert streamed(events) == choice
        assert len(engine.models) == 1


@pytest.mark.parametrize(
    ("changed", "headers"),
    [
        ({"token_ids": [9]}, {}),
        ({"sampling": {"seed": 2}}, {}),
        ({"priority": 1}, {}),
        ({}, {"X-Session-ID": "another"}),
    ],
)
async def test_another_request_under_the_id_is_refused_and_gets_nothing(
    changed: dict[str, Any], headers: dict[str, str]
) -> None:
    engine = fake()
    async with gateway_on(engine) as gateway:
        assert (await raw(gateway, body("r")))[0] == 200
        status, reply = await raw(gateway, body("r", **changed), headers)
        assert status == 409
        assert "request_id 'r' was answered with another body" in reply.decode()
        assert "token_ids" not in reply.decode()
        assert len(engine.models) == 1


async def test_another_tenants_answer_is_no_answer(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.touch(mode=0o600)
    tokens.write_text("alice: the-token-of-alice\nbob: the-token-of-bob\n")
    jobs = [{"id": "a", "tenant": "alice", "active": True}, {"id": "b", "tenant": "bob"}]
    async with gateway_on(fake(), tokens=tokens, jobs=jobs) as gateway:
        replies = [
            await raw(gateway, body("r"), {"Authorization": f"Bearer the-token-of-{name}"})
            for name in ("alice", "bob", "alice")
        ]
    assert [status for status, _ in replies] == [200, 503, 200], "only the job of alice is served"
    assert replies[2] == replies[0]


@pytest.mark.parametrize(
    ("answers", "name"),
    [({"keep_s": 0}, "r"), ({}, ""), ({"size_bytes": 2000}, "r")],
)
async def test_an_answer_not_kept_is_sampled_anew(answers: dict[str, Any], name: str) -> None:
    """Nothing is kept of requests that their clients did not name, and of those beyond a bound."""
    engine = fake()
    async with gateway_on(engine, answers=answers) as gateway:
        for _ in range(2):
            assert (await raw(gateway, body(name)))[0] == 200
        assert len(engine.models) == 2
