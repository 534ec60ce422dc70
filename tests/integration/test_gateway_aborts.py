"""A job ends its turns and trajectories before their time."""

import asyncio
import json
import socket
from functools import partial
from typing import Any

import pytest

from harvester.contracts.ids import JobId
from harvester.platform.keep_alive import end_unreachable
from scheduler.gateway.dialects import event_stream
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, GatewayInProcess, continued, gateway_on
from tests.machines import cut_off

ENDLESS = 100_000


def engine() -> FakeEngine:
    return FakeEngine(step_s=0.002, epoch=None)


def is_partial(choice: Any) -> bool:
    tokens = choice["token_ids"]
    assert tokens == continued(PROMPT, len(tokens), version=0)
    assert len(choice["logprobs"]["content"]) == len(tokens)
    assert choice["fault"] == "", "the job's own wish is no fault"
    return choice["finish_reason"] == "abort" and 0 < len(tokens) < ENDLESS


async def generating(gateway: GatewayInProcess, *names: str) -> list["asyncio.Task[Any]"]:
    tasks = [asyncio.create_task(gateway.generate(name, ENDLESS)) for name in names]
    await gateway.until_tokens(2, turns=len(names))
    return tasks


async def test_an_aborted_turn_s_reply_has_its_tokens_and_other_turns_go_on() -> None:
    fake = engine()
    async with gateway_on(fake) as gateway:
        gone, other = await generating(gateway, "r1", "r2")
        assert await gateway.post(
            "/inference/v1/abort_requests", {"request_ids": ["r1", "unknown"]}
        ) == (200, {"aborted": 1, "status": "aborted"})
        status, choice = await gone
        assert status == 200
        assert is_partial(choice)
        await gateway.until(lambda: fake.aborted == 1)
        assert not other.done()
        again = await gateway.post("/inference/v1/abort_requests", {"request_ids": ["r1"]})
        assert again == (200, {"aborted": 0, "status": "aborted"}), "no error: it has ended"
        assert await gateway.post("/abort_requests", {}) == (
            200,
            {"aborted": 1, "status": "aborted"},
        )
        assert is_partial((await other)[1])
        turns = (await gateway.status())["jobs"]["job"]["turns"]
        assert (turns["aborted"], turns["lost"], turns["failed"]) == (2, 0, 0)


async def test_a_turn_that_waits_for_a_place_is_aborted_without_a_token() -> None:
    async with gateway_on(engine()) as gateway:
        running = await generating(gateway, *(f"r{n}" for n in range(8)))
        waiting = asyncio.create_task(gateway.generate("late", 4))
        await gateway.until(lambda: gateway.scheduler.dispatcher.policy.queued_turns)
        await gateway.post("/abort_request", {"rid": "late"})
        status, choice = await waiting
        assert (status, choice["finish_reason"], choice["token_ids"]) == (200, "abort", [])
        await gateway.post("/abort_request", {"abort_all": True})
        for task in running:
            assert is_partial((await task)[1])


async def test_all_samples_of_a_request_are_aborted_by_its_name() -> None:
    async with gateway_on(engine()) as gateway:
        sampling = {"max_tokens": ENDLESS, "n": 3, "seed": 1}
        body = {"request_id": "r", "token_ids": PROMPT, "sampling_params": sampling}
        work = asyncio.create_task(gateway.post("/inference/v1/generate", body))
        await gateway.until_tokens(2, turns=3)
        assert (await gateway.post("/abort_requests", {"request_ids": ["r"]}))[1]["aborted"] == 3
        status, reply = await work
        assert status == 200
        assert len(reply["choices"]) == 3
        assert all(is_partial(choice) for choice in reply["choices"])


@pytest.mark.parametrize("by", ["abort", "pause", "another run"])
async def test_samples_that_have_not_begun_end_with_their_request(by: str) -> None:
    fake = engine()
    async with gateway_on(fake) as gateway:
        assert (await gateway.publish(2, state_hash="a" * 32))[0] == 200
        sampling = {"max_tokens": ENDLESS, "n": 1024, "seed": 1}
        body = {"request_id": "r", "token_ids": PROMPT, "sampling_params": sampling}
        work = asyncio.create_task(gateway.post("/inference/v1/generate", body))
        ledger = gateway.scheduler.ledgers[JobId("job")]
        await gateway.until(lambda: len(ledger))
        assert len(ledger) < 1024, "some have not begun"
        match by:
            case "abort":
                await gateway.post("/abort_requests", {"request_ids": ["r"]})
            case "pause":
                await gateway.post("/pause", {})
            case "another run":
                assert (await gateway.publish(2, state_hash="b" * 32))[0] == 409
        async with asyncio.timeout(30):
            status, reply = await work
        assert status == 200
        assert {choice["finish_reason"] for choice in reply["choices"]} == {"abort"}
        assert all(bool(choice["fault"]) == (by == "another run") for choice in reply["choices"])


async def test_an_abort_reaches_the_caller_s_own_job_only() -> None:
    jobs = [{"id": "job", "active": True}, {"id": "other"}]
    async with gateway_on(engine(), jobs=jobs) as gateway:
        body = {
            "request_id": "r",
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": ENDLESS},
        }
        mine = {"X-RoseMux-Job": "job"}
        work = asyncio.create_task(gateway.post("/inference/v1/generate", body, mine))
        await gateway.until_tokens(2)
        other = {"X-RoseMux-Job": "other"}
        one = ("/abort_requests", {"request_ids": ["r"]})
        assert (await gateway.post(*one, other))[1]["aborted"] == 0
        assert (await gateway.post("/finish_session?session_id=r", {}, other))[1]["aborted"] == 0
        assert (await gateway.post("/abort_requests", {}))[0] == 400, "two jobs: name one"
        assert not work.done()
        assert (await gateway.post("/abort_requests", {}, mine))[1]["aborted"] == 1
        assert (await work)[0] == 200


async def test_a_malformed_abort_is_refused_by_its_field() -> None:
    async with gateway_on(engine()) as gateway:
        for path, body, field in (
            ("/inference/v1/abort_requests", {}, "request_ids"),
            ("/abort_requests", {"request_ids": "r"}, "request_ids"),
            ("/abort_request", {}, "rid"),
            ("/finish_session", {}, "session_id"),
        ):
            status, reply = await gateway.post(path, body)
            assert status == 400
            assert field in reply["error"]


async def test_the_end_of_a_trajectory_aborts_what_is_open_and_frees_its_prefix() -> None:
    engines = [engine(), engine()]
    async with gateway_on(*engines) as gateway:
        session = {"X-SMG-Routing-Key": "episode"}
        body = {"request_id": "r1", "token_ids": PROMPT, "sampling_params": {"max_tokens": ENDLESS}}
        work = asyncio.create_task(gateway.post("/inference/v1/generate", body, session))
        await gateway.until_tokens(2)
        finished = await gateway.post("/finish_session?session_id=episode", {})
        assert finished == (200, {"aborted": 1, "status": "finished"})
        assert is_partial((await work)[1]["choices"][0])
        for again in ("/finish_session", "/close_session"):
            assert await gateway.post(again, {"session_id": "episode"}) == (
                200,
                {"aborted": 0, "status": "finished"},
            )
        # At once, so that both engines get some, however slow the aborted turn made one look.
        turns = [gateway.generate(f"s{number}", 50) for number in range(8)]
        assert [status for status, _ in await asyncio.gather(*turns)] == [200] * 8
        told = [
            ended
            for each in engines
            for extra in each.extra_args
            for ended in extra.get("rosemux_ended_trajectories", ())
        ]
        assert told == ["job/episode"], "the engine that had the prefix hears of its end once"


async def test_a_client_that_is_cut_off_in_its_stream_frees_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TCP alone gives up after 15 minutes, and probes no connection with bytes on their way."""
    monkeypatch.setattr(event_stream, "end_unreachable", partial(end_unreachable, within_s=1.0))
    loop, fake = asyncio.get_running_loop(), engine()
    sampling = {"max_tokens": ENDLESS, "seed": 1}
    asked = {"token_ids": PROMPT, "stream": True, "sampling_params": sampling}
    body = json.dumps(asked).encode()
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: g\r\nContent-Length: {len(body)}\r\n\r\n"
    async with gateway_on(fake, timeouts={"rejoin_s": 0.1}) as gateway, asyncio.timeout(30):
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", int(gateway.url.rpartition(":")[2])))
            await loop.sock_sendall(client, head.encode() + body)
            assert await loop.sock_recv(client, 100)
            cut_off(client)
            await gateway.until(lambda: fake.aborted == 1, timeout_s=20)
            assert not gateway.scheduler.ledgers[JobId("job")].turns()
