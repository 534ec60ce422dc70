"""vLLM's RL control routes at the gateway: pauses, versions, and what a fleet does not offer."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from harvester.contracts.ids import JobId
from scheduler.gateway import job_versions, version_staging
from scheduler.gateway.dialects.weight_sync import REFUSED_ROUTES
from scheduler.gateway.engines.engine_control import StageReply
from scheduler.gateway.engines.identity import HeldWeights
from scheduler.gateway.gateway_status import render_metrics
from scheduler.gateway.policy.versions_events import TimePassed
from scheduler.gateway.running_attempt import CutReason
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, GatewayInProcess, continued, gateway_on
from tests.virtual_clock import VirtualClock

ENDLESS = 100_000


def engine() -> FakeEngine:
    return FakeEngine(step_s=0.002, epoch=None)


async def is_paused(gateway: GatewayInProcess, prefix: str = "") -> bool:
    status, reply = await gateway.get(f"{prefix}/is_paused")
    assert status == 200
    return reply["is_paused"]


@pytest.mark.parametrize("prefix", ["", "/v1/jobs/job/vllm"])
async def test_a_pause_that_keeps_turns_frees_the_engines_and_the_turns_go_on(prefix: str) -> None:
    fake = engine()
    async with gateway_on(fake) as gateway:
        running = asyncio.create_task(gateway.generate("r1", 100))
        await gateway.until_tokens(2)
        assert await gateway.post(f"{prefix}/pause?mode=keep", {}) == (200, {"status": "paused"})
        assert await is_paused(gateway, prefix)
        await gateway.until(lambda: fake.open == 0)
        waiting = asyncio.create_task(gateway.generate("r2", 4))
        await gateway.until(lambda: gateway.scheduler.dispatcher.policy.queued_turns == 2)
        assert not running.done()
        assert await gateway.post(f"{prefix}/resume", {}) == (200, {"status": "resumed"})
        assert not await is_paused(gateway, prefix)
        assert (await running)[1]["token_ids"] == continued(PROMPT, 100, version=0)
        assert (await waiting)[1]["finish_reason"] == "length"
        metrics = gateway.scheduler.metrics.render().decode()
        assert "scheduler_interruptions_total{" not in metrics, "the job's own wish is none"


async def test_a_trainer_pauses_publishes_and_resumes_at_the_root() -> None:
    async with gateway_on(engine(), engine()) as gateway:
        running = asyncio.create_task(gateway.generate("r", 200))
        await gateway.until_tokens(2)
        for path, body in (
            ("/pause?mode=keep", {}),
            ("/init_weight_transfer_engine", {"init_info": {}}),
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": {"store": "job.store", "version": 1}}),
            ("/finish_weight_update", {"weight_version": "1"}),
            ("/update_weight_version", {"new_version": "1"}),
            ("/reset_prefix_cache?reset_running_requests=true", {}),
        ):
            status, reply = await gateway.post(path, body)
            assert status == 200, reply
        assert not running.done()
        assert await gateway.get("/weight_info") == (200, {"weight_version": "1"})
        assert await gateway.get("/get_world_size") == (200, {"world_size": 1})
        _, info = await gateway.get("/server_info?config_format=json")
        assert info["vllm_config"]["weight_transfer_config"] is None, "TRL ends here in words"
        assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
        assert await gateway.get("/is_sleeping") == (200, {"is_sleeping": False})
        await gateway.post("/resume", {})
        _, choice = await running
        assert [span["version"] for span in choice["spans"]] == [0, 1]
        kept = choice["spans"][0]["end"]
        assert choice["token_ids"][:kept] == continued(PROMPT, kept, version=0)


async def test_a_pause_that_aborts_ends_all_turns_and_one_that_waits_lets_them_end() -> None:
    async with gateway_on(engine()) as gateway:
        endless = asyncio.create_task(gateway.generate("r1", ENDLESS))
        await gateway.until_tokens(2)
        assert (await gateway.post("/pause", {}))[0] == 200
        status, choice = await endless
        assert (status, choice["finish_reason"]) == (200, "abort")
        assert choice["token_ids"]
        await gateway.post("/continue_generation", {})
        short = asyncio.create_task(gateway.generate("r2", 60))
        await gateway.until_tokens(2)
        pause = asyncio.create_task(gateway.post("/pause?mode=wait", {}))
        await gateway.until(lambda: gateway.scheduler.pauses.is_paused("job"))
        late = asyncio.create_task(gateway.generate("r3", 4))
        assert (await pause)[0] == 200
        assert gateway.scheduler.dispatcher.policy.open_turns == 0
        assert (await short)[1]["finish_reason"] == "length"
        assert not late.done()
        await gateway.post("/resume", {})
        assert (await late)[1]["finish_reason"] == "length"


@pytest.mark.parametrize("sglang", [False, True])
async def test_a_pause_for_a_time_ends_unless_it_is_begun_again(
    sglang: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    clock = VirtualClock(1000.0)
    async with gateway_on(engine(), clock=clock) as gateway:

        async def pause() -> None:
            if sglang:
                paused = await gateway.post("/pause_generation", {"mode": "retract", "for_s": 1.0})
            else:
                paused = await gateway.post("/pause?mode=keep&for_s=1", {})
            assert paused == (200, {"status": "paused"})

        await pause()
        turn = asyncio.create_task(gateway.generate("r", 4))
        for _ in range(3):
            clock.now_s += 0.75
            # The gateway looks for pauses that are over.
            await asyncio.sleep(0.5)
            await pause()
        assert not turn.done()
        assert gateway.scheduler.pauses.age_s(JobId("job")) == 2.25
        assert b'scheduler_job_paused_seconds{rl_job="job"} 2.25' in render_metrics(
            gateway.scheduler
        )
        clock.now_s += 1.25
        async with asyncio.timeout(30):
            assert (await turn)[1]["finish_reason"] == "length"
        assert gateway.scheduler.pauses.age_s(JobId("job")) == 0.0
        for bad in ("0", "3601", "soon", "nan"):
            status, reply = await gateway.post(f"/pause?for_s={bad}", {})
            assert (status, "for_s" in reply["error"]) == (400, True)
        assert not await is_paused(gateway)
    told = [each.message for each in caplog.records if each.name.endswith("job_pauses")]
    assert told[:2] == ["job job is paused", "job job: its pause was not renewed"]
    assert told[2] == "job job goes on after a pause of 3.5 s"


async def test_a_turn_that_cannot_move_runs_on_through_a_pause_that_keeps() -> None:
    fake = engine()
    async with gateway_on(fake) as gateway:
        sampling = {"max_tokens": 100, "stop": ["never"], "seed": 1}
        body = {"request_id": "r", "token_ids": PROMPT, "sampling_params": sampling}
        work = asyncio.create_task(gateway.post("/inference/v1/generate", body))
        await gateway.until_tokens(2)
        assert (await gateway.post("/pause_generation", {"mode": "retract"}))[0] == 200
        choice = (await work)[1]["choices"][0]
        assert (choice["finish_reason"], choice["immovable"]) == ("length", ["stop"])
        assert await is_paused(gateway)


async def test_control_calls_that_make_no_sense_for_a_fleet_are_refused_in_words() -> None:
    async with gateway_on(engine()) as gateway:
        for path, words in REFUSED_ROUTES.items():
            status, reply = await gateway.post(path, {"host": "h", "port": 1})
            assert (status, reply) == (400, {"error": f"{path}: {words}"})
        for path, body, why in (
            ("/pause?mode=freeze", {}, "mode"),
            ("/pause_generation", {"mode": "freeze"}, "mode"),
            ("/update_weight_version", {"new_version": "9"}, "is at 0"),
            ("/update_weights", {"weight_dir": "/x"}, "update_info"),
            ("/init_weight_transfer_engine", {"init_info": {"master_port": 1}}, "process group"),
        ):
            status, reply = await gateway.post(path, body)
            assert status == 400
            assert why in reply["error"]
        assert not await is_paused(gateway)


async def test_several_jobs_need_the_header_at_the_root() -> None:
    jobs = [{"id": "job", "active": True}, {"id": "other"}]
    async with gateway_on(engine(), jobs=jobs) as gateway:
        assert (await gateway.post("/pause", {}))[0] == 400
        assert (await gateway.post("/pause", {}, {"X-RoseMux-Job": "other"}))[0] == 200
        assert await is_paused(gateway, "/v1/jobs/other/vllm")
        assert not await is_paused(gateway, "/v1/jobs/job/vllm")


async def test_a_tenant_with_one_job_needs_no_header_beside_other_tenants(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.touch(mode=0o600)
    tokens.write_text("a: token-of-tenant-a\nb: token-of-tenant-b\n")
    jobs = [{"id": f"job-{tenant}", "tenant": tenant} for tenant in ("a", "b", "b2")]
    jobs[2]["tenant"] = "b"
    async with gateway_on(engine(), jobs=jobs, tokens=tokens) as gateway:

        async def pause(tenant: str) -> int:
            headers = {"Authorization": f"Bearer token-of-tenant-{tenant}"}
            return (await gateway.post("/pause", {}, headers))[0]

        assert await pause("a") == 200
        assert await pause("b") == 400, "it has two jobs"
        assert await pause("c") == 401
        paused = [job for job in gateway.scheduler.jobs if gateway.scheduler.pauses.is_paused(job)]
        assert paused == ["job-a"]


@pytest.mark.parametrize("mode", ["keep", "wait"])
async def test_a_pause_that_is_over_holds_and_waits_for_no_turn(mode: str) -> None:
    async with gateway_on(engine()) as gateway:
        running = asyncio.create_task(gateway.generate("r", 300))
        await gateway.until_tokens(2)
        gateway.scheduler.pauses.end(JobId("job"))
        async with asyncio.timeout(30):
            await gateway.scheduler.pauses.emptied(JobId("job"), cut=mode == "keep")
        assert not running.done()
        assert (await running)[1]["token_ids"] == continued(PROMPT, 300, version=0)


async def test_a_pause_that_waits_returns_once_the_job_is_resumed() -> None:
    async with gateway_on(engine()) as gateway:
        running = asyncio.create_task(gateway.generate("r", ENDLESS))
        await gateway.until_tokens(2)
        pause = asyncio.create_task(gateway.post("/pause?mode=wait", {}))
        await gateway.until(lambda: gateway.scheduler.pauses.is_paused("job"))
        gateway.scheduler.pauses.end(JobId("another"))
        await asyncio.sleep(0.05)
        assert not pause.done(), "another job's pause has ended"
        await gateway.post("/resume", {})
        async with asyncio.timeout(30):
            assert (await pause)[0] == 200
        assert not running.done()
        await gateway.scheduler.turns[JobId("job")].abort()
        assert (await running)[0] == 200


async def test_an_abort_right_after_a_cut_ends_the_turn() -> None:
    async with gateway_on(engine()) as gateway:
        running = asyncio.create_task(gateway.generate("r", ENDLESS))
        await gateway.until_tokens(2)
        for member in gateway.scheduler.fleet.members.values():
            for one in tuple(member.running):
                one.cut(CutReason.SWITCH)
        async with asyncio.timeout(30):
            assert await gateway.scheduler.turns[JobId("job")].abort() == 1
        assert (await running)[1]["finish_reason"] == "abort"


async def test_a_base_path_serves_every_route_for_its_job_without_a_header() -> None:
    jobs = [{"id": "job", "active": True}, {"id": "other"}]
    async with gateway_on(engine(), jobs=jobs) as gateway:
        body = {"request_id": "r", "token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
        status, reply = await gateway.post("/jobs/job/inference/v1/generate", body)
        assert (status, reply["model"]) == (200, "job")
        assert (await gateway.post("/jobs/other/inference/v1/generate", body))[0] == 503
        assert (await gateway.post("/jobs/other/pause", {}))[0] == 200
        assert await is_paused(gateway, "/jobs/other")
        assert not await is_paused(gateway, "/jobs/job/v1/jobs/job/vllm")
        version = {"weight_version": "0"}
        assert await gateway.get("/jobs/job/get_weight_version") == (200, version)
        assert (await gateway.get("/jobs/job/model_info"))[1]["served_model_name"] == "job"
        for path, why in (
            ("/jobs/other/v1/jobs/job/vllm/pause", "two jobs"),
            ("/jobs/..%2Fetc/pause", "letters, digits"),
            ("/jobs/unknown/pause", "not configured"),
        ):
            status, reply = await gateway.post(path, {})
            assert (status, why in reply["error"]) == (400, True)


async def test_errors_of_vllms_route_have_vllms_form() -> None:
    async with gateway_on(engine()) as gateway:
        for prefix in ("", "/jobs/job"):
            status, reply = await gateway.post(
                f"{prefix}/inference/v1/generate", {"token_ids": [1]}
            )
            error = reply["error"]
            assert (status, error["code"], error["type"]) == (400, 400, "BadRequestError")
            assert error["param"] is None
            assert "sampling_params" in error["message"]


@pytest.fixture
def quick_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_versions, "SHOWN_S", 0.2)
    monkeypatch.setattr(version_staging, "STAGE_AGAIN_S", 0.02)


@pytest.mark.usefixtures("quick_staging")
async def test_a_version_that_no_engine_can_load_changes_nothing_and_says_why() -> None:
    engines = [engine(), engine()]
    async with gateway_on(*engines) as gateway:
        assert (await gateway.publish(2))[0] == 200
        for each in engines:
            each.stage_fault = "version 50 is not published yet"
        status, reply = await gateway.publish(50)
        assert status == 503
        assert reply["error"].startswith("nothing was changed")
        assert "not published yet" in reply["error"]
        _, choice = await gateway.generate("r", 3)
        assert {span["version"] for span in choice["spans"]} == {2}
        engines[0].stage_fault = ""
        status, _ = await gateway.publish(3)
        assert status == 200, "one of them can load it"


@pytest.mark.usefixtures("quick_staging")
async def test_a_refused_publish_whose_caller_has_left_ends_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake, untaken = engine(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: untaken.append(context))
    async with gateway_on(fake) as gateway:
        assert (await gateway.publish(2))[0] == 200
        fake.stage_fault = "version 50 is not published yet"
        leaving = asyncio.create_task(gateway.publish(50))
        await gateway.until(lambda: len(fake.staged) > 1)
        leaving.cancel()
        await gateway.until(lambda: "nothing was changed" in caplog.text)
        assert leaving.cancelled()
    gc.collect()
    assert not untaken


async def test_a_version_that_the_engines_see_a_moment_later_is_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(version_staging, "STAGE_AGAIN_S", 0.02)
    fake = engine()
    async with gateway_on(fake) as gateway:
        await gateway.publish(2)
        fake.stage_fault = "version 3 is not published yet"
        published = asyncio.create_task(gateway.publish(3))
        await gateway.until(lambda: len(fake.staged) > 4)
        assert not published.done()
        fake.stage_fault = ""
        assert (await published)[0] == 200


@pytest.mark.usefixtures("quick_staging")
async def test_the_first_store_of_a_job_is_refused_where_no_engine_can_load_it() -> None:
    fake = engine()
    async with gateway_on(fake, jobs=[{"id": "job"}, {"id": "other"}]) as gateway:
        await gateway.until(lambda: all(m.up for m in gateway.scheduler.fleet.members.values()))
        fake.stage_fault = "version 50 is not published yet"
        status, reply = await gateway.publish(50)
        assert (status, reply["error"][:19]) == (503, "nothing was changed")
        fake.stage_fault = ""
        assert (await gateway.publish(1))[0] == 200, "a lower number has its turn"


async def test_an_update_of_a_job_that_is_not_active_says_that_it_is_announced_only() -> None:
    jobs = [{"id": "job", "active": True}, {"id": "other"}]
    async with gateway_on(engine(), jobs=jobs) as gateway:
        update = {"update_info": {"store": "store", "version": 1}}
        for job, says in (("job", "updated"), ("other", "once the job is active")):
            status, reply = await gateway.post(f"/jobs/{job}/update_weights", update)
            assert status == 200
            assert says in reply["message"]


@pytest.mark.usefixtures("quick_staging")
async def test_a_job_whose_store_no_engine_can_load_takes_no_engines_and_may_name_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    fake = engine()
    jobs = [{"id": "job", "active": True}, {"id": "other"}]
    async with gateway_on(fake, jobs=jobs) as gateway:
        assert (await gateway.publish(2))[0] == 200
        wrong, right = {"version": 50, "store": "wrong"}, {"version": 1, "store": "right"}
        assert (await gateway.post("/v1/jobs/other/versions", wrong))[0] == 200
        fake.stage_fault = "store wrong holds another model"
        status, reply = await gateway.post("/v1/jobs/other/activate", {})
        assert status == 503
        assert "another model" in reply["error"]
        said = await gateway.status()
        assert (said["active_job"], said["settled"]) == ("job", True)
        turn = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}
        assert (await gateway.post("/jobs/job/inference/v1/generate", turn))[0] == 200
        fake.stage_fault = ""
        assert (await gateway.post("/v1/jobs/other/versions", right))[0] == 200
        assert "version 1 of store right is announced" in caplog.text
        status, reply = await gateway.post("/v1/jobs/other/activate", {})
        assert (status, reply["version"]) == (200, 1)
        assert (await gateway.post("/v1/jobs/other/versions", wrong | {"version": 1}))[0] == 409


async def test_an_activation_of_an_older_version_tries_engines_that_cannot_load_it_once() -> None:
    fake = engine()
    jobs = [{"id": "job", "active": True}, {"id": "other"}]
    async with gateway_on(fake, jobs=jobs) as gateway:
        wrong = {"version": 50, "store": "wrong"}
        assert (await gateway.publish(2))[0] == 200
        assert (await gateway.post("/v1/jobs/other/versions", wrong))[0] == 200
        gateway.scheduler.versions._announced_s.clear()  # A while ago.
        fake.staged.clear()
        fake.stage_fault = "store wrong holds another model"
        status, reply = await gateway.post("/v1/jobs/other/activate", {})
        assert (status, "another model" in reply["error"], len(fake.staged)) == (503, True, 1)


async def test_an_engine_that_dies_in_its_switch_is_away_and_refuses_no_publish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has not failed to load the version, and is brought to it when it is back."""
    monkeypatch.setattr(job_versions, "SHOWN_S", 0.2)
    fakes = [engine(), engine()]
    times = {"health_s": 0.3}
    async with gateway_on(*fakes, versions={"retry_s": 0.1}, timeouts=times) as gateway:
        assert (await gateway.publish(1))[0] == 200
        await gateway.sites[1].close()
        status, reply = await gateway.publish(2)
        assert (status, reply.get("engines")) == (200, {"e0": "switched"}), reply
        await gateway.sites[1].serve(fakes[1].app())
        policy = gateway.scheduler.fleet.policy
        await gateway.until(lambda: policy.state("e1") == "serving")
        assert fakes[1].version == 2


async def test_an_activation_says_at_once_what_keeps_engines_from_the_version_in_force() -> None:
    fakes = [engine(), engine()]
    times = {"publish_s": 3600.0}
    async with gateway_on(*fakes, versions={"retry_s": 3600.0}, timeouts=times) as gateway:
        assert (await gateway.publish(2))[0] == 200
        policy = gateway.scheduler.fleet.policy
        fakes[1].fail_updates = 1000
        late = asyncio.create_task(gateway.publish(3))
        await gateway.until(lambda: policy.failing)
        assert not late.done(), "a store may show it later"
        gateway.scheduler.versions._announced_s.clear()
        status, reply = await gateway.post("/v1/jobs/job/activate", {})
        assert (status, "e1: switch to job.store 3: " in reply["error"]) == (503, True), reply
        assert reply["error"].startswith("job job is active; version 3 of job is not served")
        assert (await gateway.status())["active_job"] == "job"
        assert "e0: " not in reply["error"]
        fakes[1].fail_updates = 0
        gateway.scheduler.fleet.switching.observe(TimePassed())
        late.cancel()


@pytest.mark.parametrize("number", [50, 1])
async def test_a_store_that_no_engine_could_load_is_left_for_another(number: int) -> None:
    fake = engine()
    async with gateway_on(fake, versions={"retry_s": 0.1}) as gateway:
        fake.fail_updates = 1000
        wrong, right = {"version": number, "store": "wrong"}, {"version": 1, "store": "right"}
        publish = asyncio.create_task(gateway.post("/v1/jobs/job/versions", wrong))
        await gateway.until(lambda: fake.fail_updates < 1000)
        second = asyncio.create_task(gateway.post("/v1/jobs/job/versions", right))
        policy = gateway.scheduler.fleet.policy
        await gateway.until(lambda: policy.target is not None and policy.target.store == "right")
        fake.fail_updates = 0
        status, reply = await second
        assert (status, reply["engines"]) == (200, {"e0": "switched"})
        assert (await publish)[0] == 503, "another store of the same number is not this one"


class SlowStaging:
    """Each preparation takes a moment, and is written down; the store `bad` cannot be loaded."""

    def __init__(self, gateway: GatewayInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prepared: list[tuple[str, int]] = []
        for member in gateway.scheduler.fleet.members.values():
            monkeypatch.setattr(member.client, "stage", self._stage)

    async def _stage(self, wanted: HeldWeights, **_more: Any) -> StageReply:
        self.prepared.append((wanted.store, wanted.version))
        await asyncio.sleep(0.2)
        is_bad = wanted.store == "bad"
        return StageReply(not is_bad, "another model" if is_bad else "")


async def test_a_version_that_is_published_during_an_activation_is_prepared_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(version_staging, "STAGE_AGAIN_S", 0.02)
    fake, jobs = engine(), [{"id": "job", "active": True}, {"id": "other"}]
    async with gateway_on(fake, jobs=jobs) as gateway:
        assert (await gateway.publish(2))[0] == 200
        good, bad = {"version": 1, "store": "good"}, {"version": 2, "store": "bad"}
        assert (await gateway.post("/v1/jobs/other/versions", good))[0] == 200
        staging = SlowStaging(gateway, monkeypatch)
        activation = asyncio.create_task(gateway.post("/v1/jobs/other/activate", {}))
        await gateway.until(lambda: staging.prepared)
        assert (await gateway.post("/v1/jobs/other/versions", bad))[0] == 200
        assert (await activation)[0] == 503
        said = await gateway.status()
        assert (said["active_job"], said["settled"]) == ("job", True)


async def test_activations_that_no_engine_can_serve_hold_up_no_publish_of_another_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_versions, "SHOWN_S", 600.0)
    fake, jobs = engine(), [{"id": "job", "active": True}, {"id": "other"}]
    async with gateway_on(fake, jobs=jobs) as gateway:
        assert (await gateway.publish(2))[0] == 200
        bad = {"version": 50, "store": "bad"}
        assert (await gateway.post("/v1/jobs/other/versions", bad))[0] == 200
        staging = SlowStaging(gateway, monkeypatch)
        activations = [
            asyncio.create_task(gateway.post("/v1/jobs/other/activate", {})) for _ in range(3)
        ]
        await gateway.until(lambda: staging.prepared)
        async with asyncio.timeout(30):
            assert (await gateway.publish(3))[0] == 200
        for activation in activations:
            activation.cancel()
        await asyncio.gather(*activations, return_exceptions=True)


async def test_a_publish_that_is_overtaken_is_not_prepared_over_the_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gateway_on(engine()) as gateway:
        assert (await gateway.publish(1))[0] == 200
        staging = SlowStaging(gateway, monkeypatch)
        newer = asyncio.create_task(gateway.publish(3))
        await gateway.until(lambda: staging.prepared)
        assert (await gateway.publish(2))[0] == 409
        assert (await newer)[0] == 200
        assert [version for _, version in staging.prepared] == [3]
