"""Tenants beside each other at one gateway, and the two roles that are no tenants."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harvester.contracts.ids import JobId
from scheduler.gateway.settings import GatewaySettings
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import GatewayInProcess, Site, gateway_on

ROLES = ("a", "b", "operator", "observer")


def role_tokens(tmp_path: Path) -> Path:
    tokens = tmp_path / "tokens.yaml"
    tokens.touch(mode=0o600)
    tokens.write_text("".join(f"{role}: the-token-of-{role}-here\n" for role in ROLES))
    return tokens


async def answered(
    gateway: GatewayInProcess, role: str, path: str, body: Any = None
) -> tuple[int, str]:
    """A GET, or a POST of the body."""
    headers = {"Authorization": f"Bearer the-token-of-{role}-here"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request("GET" if body is None else "POST", gateway.url + path, json=body) as reply,
    ):
        return reply.status, await reply.text()


async def test_a_tenant_sees_its_own_jobs_and_the_engines_while_they_serve_them(
    tmp_path: Path,
) -> None:
    jobs = [{"id": "job-a", "tenant": "a", "active": True}, {"id": "job-b", "tenant": "b"}]
    async with gateway_on(
        FakeEngine(step_s=0.002, epoch=None), jobs=jobs, tokens=role_tokens(tmp_path)
    ) as gateway:
        seen = {role: await answered(gateway, role, "/v1/status") for role in ROLES}
        scraped = {role: (await answered(gateway, role, "/metrics"))[0] for role in ROLES}
        turn = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        status, told = await answered(
            gateway, "observer", "/jobs/job-a/inference/v1/generate", turn
        )
    assert {status for status, _ in seen.values()} == {200}
    found = {role: json.loads(text) for role, (_, text) in seen.items()}
    assert "job-a" not in seen["b"][1]
    assert (set(found["b"]["jobs"]), found["b"]["engines"]) == ({"job-b"}, {})
    # Another job is active, which is neither none nor the tenant's.
    assert found["b"]["active_job"] == ""
    assert (set(found["a"]["jobs"]), set(found["a"]["engines"])) == ({"job-a"}, {"e0"})
    for role in ("operator", "observer"):
        assert set(found[role]["jobs"]) == {"job-a", "job-b"}
        assert found[role]["active_job"] == "job-a"
    assert scraped == {"a": 403, "b": 403, "operator": 200, "observer": 200}
    assert (status, "reads status and metrics" in told) == (403, True)


async def test_no_tenant_takes_the_engines_from_open_turns_of_another(tmp_path: Path) -> None:
    jobs = [{"id": "job", "tenant": "a", "active": True}, {"id": "job-b", "tenant": "b"}]
    site = FakeEngine(step_s=0.002, epoch=None)
    async with gateway_on(site, jobs=jobs, tokens=role_tokens(tmp_path)) as gateway:
        for role, job in (("a", "job"), ("b", "job-b")):
            version = {"version": 1, "store": role}
            status, told = await answered(gateway, role, f"/v1/jobs/{job}/versions", version)
            assert status == 200, told
        site.running.clear()
        turn = {"token_ids": [1], "sampling_params": {"max_tokens": 3}}
        open_ = asyncio.create_task(answered(gateway, "a", "/inference/v1/generate", turn))
        await gateway.until(lambda: site.open == 1)
        status, told = await answered(gateway, "b", "/v1/jobs/job-b/activate", {})
        assert (status, "another tenant's job" in told) == (409, True)
        site.running.set()
        assert (await open_)[0] == 200
        assert (await answered(gateway, "b", "/v1/jobs/job-b/activate", {}))[0] == 200
        assert (await answered(gateway, "operator", "/v1/jobs/job/activate", {}))[0] == 200


async def test_no_tenant_takes_the_leases_from_open_turns_of_another(
    tmp_path: Path, fake_agent: Any
) -> None:
    guest, at_agent = FakeEngine(step_s=0.002, epoch="1"), Site()
    await at_agent.serve(guest.app())
    fake_agent.engine_url = at_agent.url
    leasing = {
        "agents": [{"id": "agent", "url": fake_agent.url}],
        "jobs": [{"id": "job", "tenant": "a", "active": True}, {"id": "job-b", "tenant": "b"}],
        "capacity_period_s": 0.1,
        "capacity": {"spill_ratio": 0.0},
    }
    dedicated = FakeEngine(step_s=0.002, epoch=None)
    async with gateway_on(dedicated, tokens=role_tokens(tmp_path), **leasing) as gateway:
        gateway.sites.append(at_agent)
        for role, job in (("a", "job"), ("b", "job-b")):
            version = {"version": 1, "store": role}
            assert (await answered(gateway, role, f"/v1/jobs/{job}/versions", version))[0] == 200
        off = {"enabled": False}
        assert (await answered(gateway, "a", "/v1/jobs/job/dedicated", off))[0] == 200
        # Not paused: the gateway resumes an engine that it has given its version.
        guest.stalled = True
        turn = {"token_ids": [1], "sampling_params": {"max_tokens": 3}}
        open_ = asyncio.create_task(answered(gateway, "a", "/inference/v1/generate", turn))
        await gateway.until(lambda: guest.open == 1)
        status, told = await answered(gateway, "b", "/v1/jobs/job-b/activate", {})
        assert (status, "another tenant's job" in told) == (409, True)
        guest.stalled = False
        assert (await open_)[0] == 200
        assert (await answered(gateway, "b", "/v1/jobs/job-b/activate", {}))[0] == 200


async def test_turns_that_begin_while_engines_prepare_keep_another_tenant_s_activation_off(
    tmp_path: Path,
) -> None:
    jobs = [{"id": "job", "tenant": "a", "active": True}, {"id": "job-b", "tenant": "b"}]
    engine = FakeEngine(step_s=0.002, epoch=None)
    async with gateway_on(engine, jobs=jobs, tokens=role_tokens(tmp_path)) as gateway:
        version = {"version": 1, "store": "b"}
        await answered(gateway, "b", "/v1/jobs/job-b/versions", version)
        engine.stage_fault = "the version is not there yet"
        activation = asyncio.create_task(answered(gateway, "b", "/v1/jobs/job-b/activate", {}))
        await gateway.until(lambda: engine.staged)
        engine.running.clear()
        turn = {"token_ids": [1], "sampling_params": {"max_tokens": 3}}
        open_ = asyncio.create_task(answered(gateway, "a", "/inference/v1/generate", turn))
        await gateway.until(lambda: engine.open == 1)
        engine.stage_fault = ""
        status, told = await activation
        assert (status, "another tenant's job" in told) == (409, True)
        engine.running.set()
        assert (await open_)[0] == 200


@pytest.mark.parametrize("why_held", ["pin", "pause"])
async def test_a_turn_that_uses_no_engine_keeps_no_activation_off(
    tmp_path: Path, why_held: str
) -> None:
    jobs = [{"id": "job", "tenant": "a", "active": True}, {"id": "job-b", "tenant": "b"}]
    turn: dict[str, Any] = {"token_ids": [1], "sampling_params": {"max_tokens": 3}}
    engine = FakeEngine(step_s=0.002, epoch=None)
    async with gateway_on(engine, jobs=jobs, tokens=role_tokens(tmp_path)) as gateway:
        for role, job in (("a", "job"), ("b", "job-b")):
            version = {"version": 1, "store": role}
            await answered(gateway, role, f"/v1/jobs/{job}/versions", version)
        if why_held == "pin":
            turn["weight_version"] = {"exact": 999, "wait_s": 3600}
        else:
            assert (await answered(gateway, "a", "/pause?mode=wait", {}))[0] == 200
        held = asyncio.create_task(answered(gateway, "a", "/inference/v1/generate", turn))
        routing = gateway.scheduler.dispatcher.policy
        job = JobId("job")
        await gateway.until(lambda: routing.deferred_turns_of(job) + routing.queued_turns_of(job))
        status, told = await answered(gateway, "b", "/v1/jobs/job-b/activate", {})
        assert status == 200, told
        assert (await held)[0] == 503, "its job is not active any more"


async def test_a_job_publishes_no_store_beside_its_own(tmp_path: Path) -> None:
    jobs = [{"id": "job", "tenant": "a", "active": True}]
    jobs += [{"id": "job-b", "tenant": "b", "stores": "b-*"}]
    engine = FakeEngine(step_s=0.002, epoch=None)
    async with gateway_on(engine, jobs=jobs, tokens=role_tokens(tmp_path)) as gateway:
        for store, allowed in (("a-weights", 400), ("b-weights", 200)):
            version = {"version": 1, "store": store}
            status, told = await answered(gateway, "b", "/v1/jobs/job-b/versions", version)
            assert status == allowed, told
        for path, body in (
            ("/update_weights", {"update_info": {"store": "a-weights", "version": 2}}),
            ("/pull_weights", {"source_dir": "/srv/a-weights", "target_version": 2}),
        ):
            status, told = await answered(gateway, "b", path, body)
            assert (status, "job job-b may publish b-*, not a-weights" in told) == (400, True)


async def test_no_priority_brings_a_turn_beside_or_before_one_of_another_tenant(
    tmp_path: Path,
) -> None:
    jobs = [{"id": "job", "tenant": "a", "active": True}, {"id": "job-b", "tenant": "b"}]
    engine = FakeEngine(step_s=0.002, epoch=None)
    urgent: dict[str, Any] = {"token_ids": [1], "sampling_params": {"max_tokens": 3}}
    urgent["priority"] = -(1 << 63)
    plain = {name: urgent[name] for name in ("token_ids", "sampling_params")}
    with_tenants: dict[str, Any] = {"jobs": jobs, "tokens": role_tokens(tmp_path)}
    async with gateway_on(engine, **with_tenants, timeouts={"silence_s": 1}) as gateway:
        await answered(gateway, "b", "/v1/jobs/job-b/versions", {"version": 1, "store": "b"})
        engine.running.clear()
        first = asyncio.create_task(answered(gateway, "a", "/inference/v1/generate", plain))
        await gateway.until(lambda: engine.open == 1)
        status, told = await answered(gateway, "b", "/inference/v1/generate", urgent)
        assert (status, "is not active" in told, engine.most_open) == (503, True, 1)
        engine.running.set()
        assert (await first)[0] == 200
        assert (await answered(gateway, "b", "/v1/jobs/job-b/activate", {}))[0] == 200
        assert (await answered(gateway, "b", "/inference/v1/generate", urgent))[0] == 200
        assert (await answered(gateway, "a", "/inference/v1/generate", plain))[0] == 503
        # The operator takes the engine from an open turn, which leaves it before the other begins.
        engine.running.clear()
        last = asyncio.create_task(answered(gateway, "b", "/inference/v1/generate", plain))
        await gateway.until(lambda: engine.open == 1)
        await answered(gateway, "a", "/v1/jobs/job/versions", {"version": 1, "store": "a"})
        assert (await answered(gateway, "operator", "/v1/jobs/job/activate", {}))[0] == 200
        engine.running.set()
        assert (await answered(gateway, "a", "/inference/v1/generate", urgent))[0] == 200
        assert (await last)[0] == 503
        assert engine.most_open == 1


async def test_no_tenant_publishes_what_another_one_has_published_also_after_a_restart(
    tmp_path: Path,
) -> None:
    """Jobs of one tenant share a store; neither job has `stores`."""
    jobs = [{"id": "job", "tenant": "a", "active": True}, {"id": "evaluate", "tenant": "a"}]
    jobs += [{"id": "job-b", "tenant": "b"}]
    engine, version = FakeEngine(step_s=0.002, epoch=None), {"version": 1, "store": "weights"}
    for again in (False, True):
        async with gateway_on(
            engine, jobs=jobs, tokens=role_tokens(tmp_path), state=tmp_path / "state.db"
        ) as gateway:
            for role, job in () if again else (("a", "job"), ("a", "evaluate")):
                status, told = await answered(gateway, role, f"/v1/jobs/{job}/versions", version)
                assert status == 200, told
            for role in ("b", "operator"):
                status, told = await answered(gateway, role, "/v1/jobs/job-b/versions", version)
                assert (status, "store: weights is another tenant's" in told) == (400, True), told
            for path, body in (
                ("/update_weights", {"update_info": {"store": "weights", "version": 1}}),
                ("/pull_weights", {"source_dir": "/srv/weights", "target_version": 1}),
            ):
                status, told = await answered(gateway, "b", path, body)
                assert (status, "another tenant's" in told) == (400, True), told


async def test_pulling_the_first_weights_takes_no_engine_from_another_tenant_either(
    tmp_path: Path,
) -> None:
    jobs = [{"id": "job", "tenant": "a", "active": True}, {"id": "job-b", "tenant": "b"}]
    site = FakeEngine(step_s=0.002, epoch=None)
    async with gateway_on(site, jobs=jobs, tokens=role_tokens(tmp_path)) as gateway:
        site.running.clear()
        turn = {"token_ids": [1], "sampling_params": {"max_tokens": 3}}
        open_ = asyncio.create_task(answered(gateway, "a", "/inference/v1/generate", turn))
        await gateway.until(lambda: site.open == 1)
        first = {"source_dir": "/srv/weights/b", "target_version": 0}
        status, told = await answered(gateway, "b", "/pull_weights", first)
        assert (status, "another tenant's job" in told) == (409, True)
        site.running.set()
        assert (await open_)[0] == 200
        assert (await answered(gateway, "b", "/pull_weights", first))[0] == 200


async def test_a_prompt_that_failed_for_one_tenant_is_tried_for_another(tmp_path: Path) -> None:
    jobs = [{"id": "job", "tenant": "a", "active": True}, {"id": "job-b", "tenant": "b"}]
    engine = FakeEngine(step_s=0.002, epoch=None)
    async with gateway_on(engine, jobs=jobs, tokens=role_tokens(tmp_path)) as gateway:
        version = {"version": 1, "store": "a"}
        assert (await answered(gateway, "a", "/v1/jobs/job/versions", version))[0] == 200
        engine.answers = {"77": 500}
        turn = {"token_ids": [77], "sampling_params": {"max_tokens": 3}}
        status, told = await answered(gateway, "a", "/inference/v1/generate", turn)
        assert (status, "engines failed twice" in told) == (422, True)
        engine.answers = {}
        assert (await answered(gateway, "a", "/inference/v1/generate", turn))[0] == 422
        version["store"] = "b"
        assert (await answered(gateway, "b", "/v1/jobs/job-b/versions", version))[0] == 200
        assert (await answered(gateway, "b", "/v1/jobs/job-b/activate", {}))[0] == 200
        status, told = await answered(gateway, "b", "/inference/v1/generate", turn)
        assert status == 200, told


async def test_a_refusal_and_a_publish_name_no_job_or_engine_of_another_tenant(
    tmp_path: Path,
) -> None:
    jobs = [{"id": "job", "tenant": "a", "active": True}]
    jobs += [{"id": f"job-{each}", "tenant": each[0]} for each in ("a2", "b")]
    engine = FakeEngine(step_s=0.002, epoch=None)
    async with gateway_on(engine, jobs=jobs, tokens=role_tokens(tmp_path)) as gateway:
        turn = {"token_ids": [1], "sampling_params": {"max_tokens": 3}}
        status, told = await answered(gateway, "b", "/inference/v1/generate", turn)
        message = json.loads(told)["error"]["message"]
        activate = "POST /v1/jobs/job-b/activate"
        assert (status, message) == (
            503,
            f"job job-b is not active (another one is); activate it first: {activate}",
        )
        engines = {}
        for role, job in (("a", "job-a2"), ("b", "job-b")):
            version = {"version": 1, "store": role}
            status, told = await answered(gateway, role, f"/v1/jobs/{job}/versions", version)
            engines[job] = json.loads(told)["engines"]
        assert engines == {"job-a2": {"e0": "catching_up"}, "job-b": {}}


def test_a_role_is_no_tenant() -> None:
    given = {"engines": [{"id": "e"}], "jobs": [{"id": "j", "tenant": "observer"}]}
    with pytest.raises(ValueError, match="observer is the name of a role"):
        GatewaySettings.model_validate(given)
