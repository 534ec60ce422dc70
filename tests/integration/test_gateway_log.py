"""The gateway's log: one line for each change that an operator asks about, none for a turn."""

import logging

import pytest

from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, gateway_on


async def test_the_log_has_engines_jobs_and_versions_and_no_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="scheduler")
    jobs = [{"id": "job", "tenant": "lab", "active": True}, {"id": "other"}]
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with gateway_on(engine, jobs=jobs) as gateway:
        await gateway.until(lambda: gateway.scheduler.fleet.policy.settled)
        await gateway.publish(1)
        turn = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}
        assert (await gateway.post("/jobs/job/inference/v1/generate", turn))[0] == 200
        for _ in range(3):
            again = {"version": 1, "store": "s"}
            assert (await gateway.post("/v1/jobs/job/versions", again))[0] == 409
        other = {"version": 4, "store": "other"}
        assert (await gateway.post("/v1/jobs/other/versions", other))[0] == 200
        site = gateway.sites[0]
        await site.close()
        await gateway.until(lambda: "is lost" in caplog.text)
        await site.serve(engine.app())
        await gateway.until(lambda: "is back" in caplog.text)
    (lost,) = [line for line in caplog.messages if "is lost" in line]
    assert lost == "engine e0 is lost: no engine or another one answers in its place"
    refused = (
        "job job: version 1 of store s: job job is at version 1 of store job.store; versions only "
        "rise, whatever store they are in; begin a new run as another job, or go on with "
        "Publisher(versions=Publisher.Versions(first_version=2))"
    )
    assert [line for line in caplog.messages if line != lost] == [
        "job job of tenant lab is registered, at version 0",
        "job other of tenant default is registered, at version 0",
        "job job is active, at version 0",
        "engine e0 is up",
        "job job: version 0 is served by all dedicated engines up",
        "job job: version 1 of store job.store is announced",
        "job job: version 1 is served by all dedicated engines up",
        refused,
        "job other: version 4 of store other is announced; the job is not active",
        "engine e0 is back",
    ]
    warned = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert [line.split(":")[0] for line in warned] == ["job job", "engine e0 is lost"]
