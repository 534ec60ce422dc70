"""Faults that belong to one request stay with it; those of an engine cost no turn."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import gateway_on
from tests.integration.test_gateway_turns import (
    PROMPT,
    expected_tokens,
    generate,
    serving,
    tokens_of,
)

BAD = [99, 1]


async def bad(service, name: str = "bad", **more: Any) -> tuple[int, Any]:
    return await generate(service, name, 10, **{"token_ids": BAD, **more})


async def published(service, *engines: Any, version: int = 1) -> None:
    await service.until("/v1/status", serving(len(engines)))
    given = {"version": version, "store": "job.store"}
    assert (await service.post("/v1/jobs/job/versions", given))[0] == 200


async def updates(engines: Any) -> int:
    calls = [(await engine.get("/_fake"))["calls"] for engine in engines]
    return sum(call == "/update_weights" for each in calls for call in each)


@pytest.mark.parametrize("status", [500, 503, 429, 404])
async def test_a_request_that_engines_do_not_take_costs_no_other_turn(
    fake_engine, gateway, status
) -> None:
    engines = [fake_engine(holds_at=60) for _ in range(3)]
    passing = status in (503, 429)
    service = gateway(*engines, timeouts={"stuck_s": 0.5 if passing else 60.0})
    await published(service, *engines)
    for engine in engines:
        await engine.post("/_fake", {"answers": {"99": status}})
    turns = [asyncio.create_task(generate(service, f"r{n}", 120)) for n in range(15)]
    await service.until("/v1/status", lambda s: s["placed_turns"] == 15)
    code, reply = await bad(service)
    assert code == (503 if passing else 422)
    assert "not this one" in reply["error"]["message"]
    for engine in engines:
        await engine.post("/_fake", {"holds_at": 0})
    for ended in await asyncio.gather(*turns):
        assert tokens_of(ended[1]) == expected_tokens(PROMPT, 120, version=1)
    counters = (await service.get("/v1/status"))["jobs"]["job"]["turns"]
    assert (counters["completed"], counters["migrated"], counters["lost"]) == (15, 0, 0)
    assert await updates(engines) == 3, "one for each engine, at the publish"


async def test_a_request_that_kills_two_engines_is_refused_with_the_reason(
    fake_engine, gateway
) -> None:
    engines = [fake_engine(holds_at=60) for _ in range(4)]
    service = gateway(*engines)
    await service.until("/v1/status", serving(4))
    for engine in engines:
        await engine.post("/_fake", {"dies_of": 99})
    turns = [asyncio.create_task(generate(service, f"r{n}", 100)) for n in range(12)]
    await service.until("/v1/status", lambda s: s["placed_turns"] == 12)
    code, reply = await bad(service)
    assert code == 422
    assert "failed twice under this request" in reply["error"]["message"]
    assert (await bad(service, "again"))[0] == 422, "the same content under another id"
    for engine in engines:
        if engine.process.poll() is None:
            await engine.post("/_fake", {"holds_at": 0})
    for status, ended in await asyncio.gather(*turns):
        assert status == 200
        assert tokens_of(ended) == expected_tokens(PROMPT, 100)
    assert sum(engine.process.poll() is not None for engine in engines) == 2
    counters = (await service.get("/v1/status"))["jobs"]["job"]["turns"]
    assert (counters["completed"], counters["failed"], counters["lost"]) == (12, 2, 0)


@pytest.mark.parametrize("after", ["break", "wait"])
async def test_a_finish_is_final_whatever_becomes_of_its_stream(
    fake_engine, gateway, after
) -> None:
    engines = [fake_engine(step_s=0.002), fake_engine(step_s=0.002)]
    service = gateway(*engines)
    await published(service, *engines)
    whole = expected_tokens(PROMPT, 60, version=1)
    eos = whole[8]
    ended = whole[: whole.index(eos) + 1]
    for engine in engines:
        await engine.post("/_fake", {"eos": [eos], "after_finish": after})
    turns = [asyncio.create_task(generate(service, f"r{n}", 60)) for n in range(4)]
    await service.until_sampled(4 * len(ended))
    await service.post("/v1/jobs/job/versions", {"version": 2, "store": "job.store"})
    for status, reply in await asyncio.gather(*turns):
        (choice,) = reply["choices"]
        assert (status, choice["finish_reason"], tokens_of(reply)) == (200, "stop", ended)
        assert [span["version"] for span in choice["spans"]] == [1]


async def test_a_guests_aborts_are_no_failures_of_the_turn(fake_engine, gateway) -> None:
    engine = fake_engine()
    service = gateway(engine, max_attempts=2)
    await service.until("/v1/status", serving(1))
    await engine.post("/_fake", {"aborts": 4})
    status, reply = await generate(service, "r")
    assert (status, tokens_of(reply)) == (200, expected_tokens(PROMPT, 20))
    assert (await engine.get("/_fake"))["calls"] is not None


async def test_a_turn_without_progress_ends_in_time_with_the_reason(fake_engine, gateway) -> None:
    engine = fake_engine()
    service = gateway(engine, timeouts={"stuck_s": 0.5})
    await service.until("/v1/status", serving(1))
    await engine.post("/_fake", {"aborts": 1000})
    status, reply = await generate(service, "r")
    assert status == 503
    assert "no engine made a token" in reply["error"]["message"]


async def test_a_step_whose_batch_takes_longer_than_the_queue_time_is_served(
    fake_engine, gateway
) -> None:
    engine = fake_engine(step_s=0.02)
    service = gateway(engine, timeouts={"queue_s": 0.2})
    await service.until("/v1/status", serving(1))
    replies = await asyncio.gather(*(generate(service, f"r{n}", 20) for n in range(40)))
    assert [status for status, _ in replies] == [200] * 40


async def test_the_same_request_again_joins_the_turn_that_is_open(fake_engine, gateway) -> None:
    engine = fake_engine(holds_at=20)
    service = gateway(engine)
    first = asyncio.create_task(generate(service, "r", 40))
    await service.until("/v1/status", lambda s: s["placed_turns"] == 1)
    again = asyncio.create_task(generate(service, "r", 40))
    streamed = asyncio.create_task(generate(service, "r", 41))
    assert (await streamed)[0] == 409
    assert "another body" in (await streamed)[1]["error"]["message"]
    await engine.post("/_fake", {"holds_at": 0})
    assert (await first) == (await again)
    assert tokens_of((await again)[1]) == expected_tokens(PROMPT, 40)
    looked = await engine.get("/_fake")
    assert len(looked["models"]) == 1, "sampled once"
    counters = (await service.get("/v1/status"))["jobs"]["job"]["turns"]
    assert (counters["started"], counters["completed"]) == (1, 1)


@pytest.mark.parametrize("runs_on", [True, False])
async def test_a_client_that_timed_out_and_asks_again_gets_its_turn(
    fake_engine, gateway, runs_on
) -> None:
    """The turn may still be running then, or have ended."""
    engine = fake_engine(holds_at=20)
    service = gateway(engine, timeouts={"rejoin_s": 60})
    first = asyncio.create_task(generate(service, "r", 30))
    await engine.until("/_fake", lambda looked: looked["open"] == 1)
    first.cancel()
    again = asyncio.create_task(generate(service, "r", 30)) if runs_on else None
    await asyncio.sleep(0.1)
    await engine.post("/_fake", {"holds_at": 0})
    await service.until("/v1/status", lambda s: s["jobs"]["job"]["turns"]["completed"] == 1)
    status, reply = await (again or generate(service, "r", 30))
    assert (status, tokens_of(reply)) == (200, expected_tokens(PROMPT, 30))
    assert len((await engine.get("/_fake"))["models"]) == 1, "sampled once"
    assert await generate(service, "r", 30) == (status, reply), "also when it was answered"
    assert len((await engine.get("/_fake"))["models"]) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weight_verson": {"exact": 3}}, "did you mean 'weight_version'"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"weight_version": {"exact": 3, "minimum": 5}}, "older than minimum"),
        ({"token_ids": [1 << 20]}, "token_ids"),
    ],
)
async def test_a_field_that_would_be_ignored_is_refused_by_name(
    fake_engine, gateway, given, said
) -> None:
    engine = fake_engine()
    service = gateway(engine)
    status, reply = await generate(service, "r", **given)
    assert status == 400
    assert said in reply["error"]["message"]
    assert (await generate(service, "r", model="job"))[0] == 200


@pytest.mark.parametrize("broken", ["routing", "versions"])
async def test_an_error_of_a_policy_ends_the_gateway_and_not_only_a_call(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decisions of the policy are lost with the error: turns would wait for ever."""

    def fails(_event: object, *, now: float) -> None:
        raise KeyError(now)

    async with gateway_on(FakeEngine(step_s=0.001, epoch=None)) as gateway:
        assert (await gateway.generate("before", 2))[0] == 200
        scheduler = gateway.scheduler
        policy = scheduler.dispatcher.policy if broken == "routing" else scheduler.fleet.policy
        monkeypatch.setattr(policy, "observe", fails)
        turn = {"token_ids": [4, 5], "sampling_params": {"max_tokens": 2}}
        version = {"version": 1, "store": "job.store"}
        path, body = (
            ("/inference/v1/generate", turn)
            if broken == "routing"
            else ("/v1/jobs/job/versions", version)
        )
        async with (
            aiohttp.ClientSession() as session,
            session.post(gateway.url + path, json=body) as reply,
        ):
            assert reply.status == 500
        with pytest.raises(KeyError):
            async with asyncio.timeout(30):
                await scheduler.failed()


async def test_a_gateway_whose_policy_goes_on_failing_answers_its_clients_as_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine(step_s=0.01, epoch=None)
    async with gateway_on(engine) as gateway:
        scheduler = gateway.scheduler
        running = [asyncio.create_task(gateway.generate(f"r{n}", 1000)) for n in range(12)]
        await gateway.until_tokens(2, turns=8)
        released: list[bool] = []

        async def release_all() -> None:
            released.append(True)

        def fails(_event: object, *, now: float) -> None:
            raise KeyError(now)

        monkeypatch.setattr(scheduler.harvest, "release_all", release_all)
        monkeypatch.setattr(scheduler.dispatcher.policy, "observe", fails)
        gateway.service.close()
        scheduler.runner.close()
        answers = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 5)
        # A 500 has no JSON; a connection that breaks would be another error.
        assert all(isinstance(each, tuple | aiohttp.ContentTypeError) for each in answers)
        await scheduler.close()
        assert released
        monkeypatch.undo()
        monkeypatch.setattr(scheduler, "close", release_all)


async def test_a_turn_that_no_engine_serves_is_refused_with_the_fault_of_an_engine(
    tmp_path: Path,
) -> None:
    class Nameless(FakeEngine):
        async def say_engine(self, _request: web.Request) -> web.Response:
            return web.json_response({"identity": 7})

    tokens = tmp_path / "tokens.yaml"
    tokens.touch(mode=0o600)
    tokens.write_text("default: the-token-of-job\nlab: the-token-of-the-lab\n")
    jobs = [{"id": "job", "active": True}, {"id": "other", "tenant": "lab"}]
    given: dict[str, Any] = {"jobs": jobs, "timeouts": {"queue_s": 0.4}}
    said = {}
    async with gateway_on(Nameless(step_s=0.001, epoch=None), tokens=tokens, **given) as gateway:
        members = gateway.scheduler.fleet.members.values()
        await gateway.until(lambda: any(each.fault for each in members))
        for job, token in (("job", "the-token-of-job"), ("other", "the-token-of-the-lab")):
            body = {"token_ids": [4], "sampling_params": {"max_tokens": 1}}
            headers = {"Authorization": f"Bearer {token}"}
            path = f"/jobs/{job}/inference/v1/generate"
            status, reply = await gateway.post(path, body, headers)
            assert status == 503
            said[job] = reply["error"]["message"]
    assert "; engine e0: cannot read the engine's identity: " in said["job"]
    assert len(said["job"]) < 400
    assert "e0" not in said["other"], "another tenant's job may not see the engines"
