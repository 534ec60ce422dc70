"""The real gateway process on fake engines: turns survive engines, clients and restarts."""

import asyncio
import json
import re
import signal
from typing import Any

import aiohttp
import pytest
import xxhash

PROMPT = [1, 2, 3]


def expected_tokens(prompt: list[int], count: int, version: int = 0) -> list[int]:
    """The fake engine's tokens, all in one go."""
    token_ids = list(prompt)
    for _ in range(count):
        text = f"{version}:{len(token_ids)}:{token_ids[-8:]}"
        token_ids.append(xxhash.xxh3_64_intdigest(text.encode()) % 256)
    return token_ids[len(prompt) :]


def body(name: str, max_tokens: int = 20, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "temperature": 1.0, "seed": 5}
    return {"request_id": name, "token_ids": PROMPT, "sampling_params": sampling, **more}


async def generate(gateway, name: str, max_tokens: int = 20, **more: Any) -> tuple[int, Any]:
    return await gateway.post(
        "/inference/v1/generate", body(name, max_tokens, **more), X_Session_ID=f"t.{name}"
    )


def serving(count: int):
    return lambda status: sum(e["state"] == "serving" for e in status["engines"].values()) == count


def tokens_of(reply: Any) -> list[int]:
    (choice,) = reply["choices"]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    spans = choice["spans"]
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == len(choice["token_ids"])
    return choice["token_ids"]


async def test_a_killed_engines_turns_go_on_elsewhere_from_their_last_token(
    fake_engine, gateway
) -> None:
    engines = [fake_engine(holds_at=20), fake_engine(holds_at=20)]
    service = gateway(*engines)
    await service.until("/v1/status", serving(2))
    turns = [asyncio.create_task(generate(service, f"r{n}", 60)) for n in range(8)]
    await service.until_sampled(8 * 19)
    assert (await service.get("/v1/status"))["engines"]["e0"]["open_turns"] > 0
    engines[0].kill(signal.SIGKILL)
    await engines[1].post("/_fake", {"holds_at": 0})
    for status, reply in await asyncio.gather(*turns):
        assert status == 200
        assert tokens_of(reply) == expected_tokens(PROMPT, 60)
        assert reply["choices"][0]["finish_reason"] == "length"
    counters = (await service.get("/v1/status"))["jobs"]["job"]["turns"]
    assert counters["migrated"] > 0
    assert (counters["completed"], counters["lost"], counters["duplicated"]) == (8, 0, 0)


async def test_an_engine_that_comes_back_serves_again(fake_engine, gateway) -> None:
    engine = fake_engine()
    service = gateway(engine)
    assert (await generate(service, "before"))[0] == 200
    port = int(engine.url.rsplit(":", 1)[1])
    engine.kill()
    waiting = asyncio.create_task(generate(service, "during"))
    await asyncio.sleep(0.3)
    fake_engine(port=port)
    assert (await waiting)[0] == 200


async def test_a_stream_that_ends_whole_without_a_reason_was_aborted_and_its_engine_is_well(
    fake_engine, gateway
) -> None:
    """vLLM up to 0.30 does this if the guest had to end a turn between two chunks."""
    engine = fake_engine(step_s=0.01)
    service = gateway(engine)
    await service.until("/v1/status", serving(1))
    await engine.post("/_fake", {"ends_after": 5})
    turns = [generate(service, f"r{n}", 40) for n in range(3)]
    replies = [reply for _, reply in await asyncio.gather(*turns)]
    assert [tokens_of(reply) for reply in replies] == [expected_tokens(PROMPT, 40)] * 3
    looked = await engine.get("/_fake")
    assert looked["ends_after"] == 0, "one of them did end so"
    assert looked["aborted"] == 0, "the others went on undisturbed"


async def test_a_silent_engine_loses_its_turn_to_one_that_has_room(fake_engine, gateway) -> None:
    silent, other = fake_engine(holds_at=20), fake_engine()
    port = int(other.url.rsplit(":", 1)[1])
    other.kill()
    service = gateway(silent, other, timeouts={"stall_s": 0.5})
    turn = asyncio.create_task(generate(service, "r", 60))
    await service.until_sampled(19)
    fake_engine(port=port)
    _, reply = await turn
    assert tokens_of(reply) == expected_tokens(PROMPT, 60)
    assert len({span["engine"] for span in reply["choices"][0]["spans"]}) == 2


async def test_more_turns_than_places_wait_and_no_engine_gets_more_than_its_places(
    fake_engine, gateway
) -> None:
    engine = fake_engine(holds_at=5)
    service = gateway(engine)
    turns = [asyncio.create_task(generate(service, f"r{n}", 10)) for n in range(60)]
    await engine.until("/_fake", lambda looked: looked["open"] == 8)
    await engine.post("/_fake", {"holds_at": 0})
    replies = await asyncio.gather(*turns)
    assert [status for status, _ in replies] == [200] * 60
    looked = await engine.get("/_fake")
    assert looked["most_open"] == 8


async def test_a_client_that_leaves_aborts_its_turn_on_the_engine(fake_engine, gateway) -> None:
    engine = fake_engine(step_s=0.02)
    service = gateway(engine)
    turn = asyncio.create_task(generate(service, "r", 5000))
    await engine.until("/_fake", lambda looked: looked["open"] == 1)
    turn.cancel()
    await engine.until("/_fake", lambda looked: looked["open"] == 0)
    counters = (await service.get("/v1/status"))["jobs"]["job"]["turns"]
    assert (counters["aborted"], counters["lost"]) == (1, 0)
    assert (await generate(service, "r", 3))[0] == 200


async def test_sigterm_ends_open_turns_as_aborted_with_their_tokens(fake_engine, gateway) -> None:
    engine = fake_engine(holds_at=10)
    service = gateway(engine)
    turns = [asyncio.create_task(generate(service, f"r{n}", 5000)) for n in range(3)]
    await service.until_sampled(3 * 9)
    assert service.kill(signal.SIGTERM) == 0
    for status, reply in await asyncio.gather(*turns):
        assert status == 200
        tokens = tokens_of(reply)
        choice = reply["choices"][0]
        assert (choice["finish_reason"], choice["fault"]) == (
            "abort",
            "the gateway is shutting down",
        )
        assert 0 < len(tokens) < 5000
        assert tokens == expected_tokens(PROMPT, len(tokens))


async def test_a_stream_carries_each_token_once_and_ends(fake_engine, gateway) -> None:
    holds_at = 8
    engine = fake_engine(holds_at=holds_at)
    service = gateway(engine)
    parts: list[Any] = []
    made = 0
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{service.url}/inference/v1/generate", json=body("r", 30, stream=True)
        ) as response,
    ):
        assert response.headers["Content-Type"] == "text/event-stream"
        async for line in response.content:
            if line.startswith(b"data: "):
                parts.append(line[6:].strip())
                made += line.count(b'"token_id":')
                if made == holds_at - 1:
                    holds_at += 8
                    await engine.post("/_fake", {"holds_at": holds_at})
    assert parts.pop() == b"[DONE]"
    choices = [json.loads(part)["choices"][0] for part in parts]
    assert len(choices) > 3, "tokens come while the turn is open"
    assert [t for c in choices for t in c["token_ids"]] == expected_tokens(PROMPT, 30)
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert choices[-1]["spans"][0]["start"] == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (b"{", "generate request"),
        (json.dumps({**body("r"), "token_ids": []}).encode(), "token_ids"),
        (json.dumps(body("r", 0)).encode(), "max_tokens"),
        (
            json.dumps({**body("r"), "token_ids": [1 << 18]}).encode(),
            "256 token ids|and 255",
        ),
    ],
)
async def test_bad_input_is_a_400_that_says_why(fake_engine, gateway, given, said) -> None:
    service = gateway(fake_engine())
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{service.url}/inference/v1/generate", data=given) as response,
    ):
        assert response.status == 400
        assert re.search(said, (await response.json())["error"]["message"])


async def test_refuses_unknown_jobs_oversized_bodies_and_another_turn_of_an_open_id(
    fake_engine, gateway
) -> None:
    engine = fake_engine(holds_at=5)
    service = gateway(engine, max_body_bytes=4096)
    for job, said in (("other", "not configured"), ("../x", "use 1 to 64")):
        status, reply = await service.post("/inference/v1/generate", body("r"), X_RoseMux_Job=job)
        assert status == 400
        assert said in reply["error"]["message"]
    status, _ = await service.post("/inference/v1/generate", body("r", token_ids=[1] * 9000))
    assert status == 413
    first = asyncio.create_task(generate(service, "same", 40))
    await service.until("/v1/status", lambda s: s["placed_turns"] == 1)
    status, reply = await generate(service, "same")
    assert status == 409
    assert "'same' is being served" in reply["error"]["message"]
    await engine.post("/_fake", {"holds_at": 0})
    assert (await first)[0] == 200


async def test_no_engine_in_time_is_a_503_to_be_retried(fake_engine, gateway) -> None:
    engine = fake_engine()
    engine.kill()
    service = gateway(engine, timeouts={"queue_s": 0.3})
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{service.url}/inference/v1/generate", json=body("r")) as response,
    ):
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
    assert (await service.get("/v1/status"))["jobs"]["job"]["turns"]["refused"] == 1


async def test_with_tokens_only_a_jobs_own_tenant_may_speak_for_it(
    fake_engine, gateway, tmp_path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice: {'a' * 20}\nbob: {'b' * 20}\n")
    tokens.chmod(0o600)
    service = gateway(
        fake_engine(), token_file=str(tokens), jobs=[{"id": "job", "tenant": "alice"}]
    )
    for authorization, expected in (
        ("", 401),
        (f"Bearer {'b' * 20}", 400),
        (f"Bearer {'a' * 20}", 200),
    ):
        status, _ = await service.post(
            "/inference/v1/generate", body("r"), Authorization=authorization
        )
        assert status == expected
    for key, expected in (("b" * 20, 400), ("a" * 20, 200)):
        status, _ = await service.post("/api/v1/create_session", {}, X_API_Key=key)
        assert status == expected, "Tinker's client has its token there"
