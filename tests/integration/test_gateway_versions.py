"""Version switches through the real gateway process: order, pins, failures, restarts, two jobs."""

import asyncio
import signal
from typing import Any

import xxhash

PROMPT = [4, 5, 6]
SWITCH = [
    "/pause?mode=keep",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache?reset_running_requests=true",
    "/resume",
]


def continue_tokens(token_ids: list[int], count: int, version: int) -> list[int]:
    token_ids = list(token_ids)
    for _ in range(count):
        text = f"{version}:{len(token_ids)}:{token_ids[-8:]}"
        token_ids.append(xxhash.xxh3_64_intdigest(text.encode()) % 256)
    return token_ids


async def generate(
    gateway, name: str, max_tokens: int, pin: dict[str, int] | None = None, job="job"
):
    body: dict[str, Any] = {
        "request_id": name,
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": max_tokens, "temperature": 1.0, "seed": 1},
    }
    if pin is not None:
        body["weight_version"] = pin
    status, reply = await gateway.post("/inference/v1/generate", body, X_RoseMux_Job=job)
    return status, reply


async def publish(gateway, version: int, job: str = "job", **more: Any):
    return await gateway.post(
        f"/v1/jobs/{job}/versions", {"version": version, "store": f"{job}.store", **more}
    )


async def test_a_publish_answers_when_the_dedicated_engines_have_switched(
    fake_engine, gateway
) -> None:
    engines = [fake_engine(), fake_engine()]
    service = gateway(*engines)
    status, reply = await publish(service, 1)
    assert status == 200
    assert reply["version"] == 1
    assert "switched" in reply["engines"].values()
    await service.until(
        "/v1/status", lambda s: all(e["version"] == 1 for e in s["engines"].values())
    )
    await publish(service, 2)
    looked = await engines[0].get("/_fake")
    assert looked["updated"] == {"store": "job.store", "version": 2}
    assert looked["calls"][-13:] == [*SWITCH, *(c for c in SWITCH if "init" not in c)]


async def test_turns_of_a_job_with_adapters_ask_for_its_adapter(fake_engine, gateway) -> None:
    engine = fake_engine()
    service = gateway(engine, jobs=[{"id": "job", "adapter": "policy"}, {"id": "whole"}])
    await publish(service, 1)
    assert (await generate(service, "a", 2))[0] == 200
    looked = await engine.get("/_fake")
    assert looked["updated"] == {"store": "job.store", "version": 1, "adapter": "policy"}
    await publish(service, 2)
    looked = await engine.get("/_fake")
    # An engine that is up at the first publish has prepared that version as well.
    assert next(one for one in looked["staged"] if one[1] == 2)[:3] == ["job.store", 2, "policy"]
    await publish(service, 1, job="whole")
    await service.post("/v1/jobs/whole/activate", {})
    await service.until("/v1/status", lambda s: s["active_job"] == "whole" and s["settled"])
    assert (await generate(service, "b", 2, job="whole"))[0] == 200
    looked = await engine.get("/_fake")
    assert looked["updated"] == {"store": "whole.store", "version": 1}
    assert looked["models"] == ["policy", None]


async def test_another_run_s_version_of_the_same_number_is_refused(fake_engine, gateway) -> None:
    service = gateway(fake_engine(), fake_engine())
    held = f"{3:032x}"
    assert (await publish(service, 3, state_hash=held))[0] == 200
    assert (await publish(service, 3, state_hash=held))[0] == 200, "again, by the same run"
    status, reply = await publish(service, 3, state_hash="f" * 32)
    assert status == 409
    assert "the store holds another run" in reply["error"]


async def test_pins_are_kept_and_a_version_that_is_nowhere_is_refused(fake_engine, gateway) -> None:
    service = gateway(fake_engine(), timeouts={"pin_s": 0})
    await publish(service, 3)
    status, reply = await generate(service, "a", 5, {"exact": 3})
    assert status == 200
    assert reply["choices"][0]["spans"][0]["version"] == 3
    assert PROMPT + reply["choices"][0]["token_ids"] == continue_tokens(PROMPT, 5, 3)
    for pin, expected in (({"exact": 2}, 410), ({"exact": 4}, 409), ({"minimum": 4}, 409)):
        status, reply = await generate(service, "b", 5, pin)
        assert status == expected
        assert "job is at 3" in reply["error"]["message"]
    assert (await publish(service, 2))[0] == 409
    assert (await publish(service, 0))[0] == 400
    status, reply = await service.post("/v1/jobs/job/versions", {"version": 3, "store": "again"})
    assert status == 409
    assert "store job.store" in reply["error"]
    assert (await service.get("/v1/status"))["jobs"]["job"]["store"] == "job.store"
    status, _ = await service.post("/v1/jobs/job/versions", {"version": 4, "store": "../etc"})
    assert status == 400


async def test_a_switch_waits_for_turns_pinned_to_exactly_the_old_version(
    fake_engine, gateway
) -> None:
    engine = fake_engine(holds_at=100)
    service = gateway(engine)
    await publish(service, 1)
    pinned = asyncio.create_task(generate(service, "pinned", 200, {"exact": 1}))
    await engine.until("/_fake", lambda looked: looked["open"] == 1)
    switch = asyncio.create_task(publish(service, 2))
    await service.until("/v1/status", lambda s: s["engines"]["e0"]["state"] == "quiescing")
    after = asyncio.create_task(generate(service, "after", 5, {"exact": 2}))
    await engine.post("/_fake", {"holds_at": 0})
    status, reply = await pinned
    (span,) = reply["choices"][0]["spans"]
    assert (status, span["version"], span["end"]) == (200, 1, 200)
    assert (await switch)[0] == 200
    status, reply = await after
    assert [span["version"] for span in reply["choices"][0]["spans"]] == [2]


async def test_engines_prepare_a_version_while_their_turns_run(fake_engine, gateway) -> None:
    engine = fake_engine(holds_at=40)
    service = gateway(engine)
    await publish(service, 1)
    turn = asyncio.create_task(generate(service, "free", 80, {"minimum": 1}))
    await engine.until("/_fake", lambda looked: looked["open"] == 1)
    assert (await publish(service, 2))[0] == 200
    await engine.post("/_fake", {"holds_at": 0})
    assert (await turn)[0] == 200
    looked = await engine.get("/_fake")
    # An engine that is up at the first publish has prepared that version as well.
    assert [one for one in looked["staged"] if one[1] == 2] == [["job.store", 2, 1]] * 2


async def test_a_publisher_may_end_pinned_turns_instead_of_waiting(fake_engine, gateway) -> None:
    engine = fake_engine(step_s=0.01)
    service = gateway(engine)
    await publish(service, 1)
    pinned = asyncio.create_task(generate(service, "pinned", 5000, {"exact": 1}))
    await service.until_sampled(1)
    assert (await publish(service, 2, cut_open_turns=True))[0] == 200
    status, reply = await pinned
    choice = reply["choices"][0]
    assert (status, choice["finish_reason"]) == (200, "abort")
    tokens = choice["token_ids"]
    assert PROMPT + tokens == continue_tokens(PROMPT, len(tokens), 1)


async def test_a_turn_whose_pin_allows_it_goes_on_at_the_new_version(fake_engine, gateway) -> None:
    engine = fake_engine(holds_at=40)
    service = gateway(engine)
    await publish(service, 1)
    turn = asyncio.create_task(generate(service, "free", 80, {"minimum": 1}))
    await service.until_sampled(39)
    assert (await publish(service, 2))[0] == 200
    await engine.post("/_fake", {"holds_at": 0})
    status, reply = await turn
    choice = reply["choices"][0]
    assert (status, choice["finish_reason"], len(choice["token_ids"])) == (200, "length", 80)
    first, second = choice["spans"]
    assert (first["version"], second["version"], second["end"]) == (1, 2, 80)
    assert first["end"] == second["start"] > 0
    so_far = continue_tokens(PROMPT, first["end"], 1)
    assert PROMPT + choice["token_ids"] == continue_tokens(so_far, 80 - first["end"], 2)


async def test_a_failed_update_is_repeated_and_its_engine_serves_nothing_meanwhile(
    fake_engine, gateway
) -> None:
    engine = fake_engine()
    service = gateway(engine, versions={"retry_s": 0.2})
    await publish(service, 1)
    await engine.post("/_fake", {"fail_updates": 1000})
    switch = asyncio.create_task(publish(service, 2))
    status = await service.until("/v1/status", lambda s: s["engines"]["e0"]["state"] == "failed")
    assert "state hash mismatch" in status["engines"]["e0"]["fault"]
    turn = asyncio.create_task(generate(service, "r", 3, {"exact": 2}))
    await engine.until("/_fake", lambda looked: looked["calls"].count("/update_weights") > 2)
    assert not turn.done()
    await engine.post("/_fake", {"fail_updates": 0})
    assert (await switch)[0] == 200
    assert (await turn)[0] == 200


async def test_a_publish_that_no_dedicated_engine_reaches_is_a_503_with_the_reason(
    fake_engine, gateway
) -> None:
    engine = fake_engine()
    service = gateway(engine, timeouts={"publish_s": 0.5})
    await publish(service, 1)
    await engine.post("/_fake", {"fail_updates": 1000})
    await publish(service, 2)
    await service.until(
        "/v1/status", lambda s: "state hash mismatch" in s["engines"]["e0"]["fault"]
    )
    status, reply = await publish(service, 2)
    assert status == 503
    assert "state hash mismatch" in reply["error"]


async def test_two_jobs_take_turns_on_the_engines(fake_engine, gateway) -> None:
    engine = fake_engine()
    service = gateway(engine, jobs=[{"id": "a", "active": True}, {"id": "b"}])
    assert (await publish(service, 1, "a"))[0] == 200
    status, reply = await publish(service, 7, "b")
    assert (status, reply["engines"]) == (200, {"e0": "catching_up"})
    assert (await generate(service, "r", 3, {"exact": 7}, "b"))[0] == 503
    status, reply = await service.post("/v1/jobs/b/activate", {})
    assert (status, reply["version"], reply["engines"]) == (200, 7, {"e0": "switched"})
    assert (await generate(service, "r", 3, {"exact": 7}, "b"))[0] == 200
    assert (await engine.get("/_fake"))["updated"] == {"store": "b.store", "version": 7}
    assert (await generate(service, "r", 3, {"exact": 1}, "a"))[0] == 503


async def test_a_restarted_gateway_brings_engines_to_the_version_it_knew(
    fake_engine, gateway, tmp_path
) -> None:
    engine, state = fake_engine(), str(tmp_path / "state.db")
    first = gateway(engine, state_file=state)
    await publish(first, 4)
    first.kill(signal.SIGKILL)
    port = int(engine.url.rsplit(":", 1)[1])
    engine.kill()
    engine = fake_engine(port=port)
    second = gateway(engine, state_file=state)
    status, reply = await generate(second, "r", 3, {"exact": 4})
    assert status == 200
    assert reply["choices"][0]["spans"][0]["version"] == 4
    assert (await publish(second, 3))[0] == 409


async def test_the_recorded_decisions_replay_identically(fake_engine, gateway, tmp_path) -> None:
    from scheduler.sim.replay import replay_journal

    engine, journal = fake_engine(), tmp_path / "journal"
    service = gateway(engine, journal_dir=str(journal))
    for version in (1, 2, 3):
        await publish(service, version)
    service.kill(signal.SIGTERM)
    replayed = replay_journal(journal / "scheduler.policy.versions.jsonl")
    assert replayed.difference is None
    assert replayed.effects >= 12
