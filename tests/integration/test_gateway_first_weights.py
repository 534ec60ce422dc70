"""Version 0 at an engine after an update that failed: its first weights, or none that it knows."""

import asyncio
from typing import Any

from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, continued, gateway_on

JOBS = [{"id": "job", "active": True}, {"id": "base"}]
TURN = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}
BASE = {"X-RoseMux-Job": "base"}
BRIEF: dict[str, Any] = {"jobs": JOBS, "timeouts": {"publish_s": 0.5, "queue_s": 0.5}}


def failing() -> FakeEngine:
    engine = FakeEngine(step_s=0.001, epoch=None)
    engine.fail_updates = 1 << 20
    return engine


async def test_an_engine_that_a_failed_update_paused_serves_its_first_weights_again() -> None:
    async with gateway_on(failing(), **BRIEF) as gateway, asyncio.timeout(30):
        assert (await gateway.publish(1))[0] == 503
        assert (await gateway.post("/v1/jobs/base/activate", {}))[0] == 200
        status, reply = await gateway.post("/inference/v1/generate", TURN, BASE)
        assert status == 200
        assert list(reply["choices"][0]["token_ids"]) == continued(PROMPT, 4, version=0)


async def test_a_guest_that_an_earlier_lease_left_paused_serves_its_first_weights() -> None:
    guest = FakeEngine(step_s=0.001, epoch="1")
    guest.slot = "s"
    guest.running.clear()
    async with gateway_on("http://127.0.0.1:9") as gateway, asyncio.timeout(30):
        await gateway.add_guest(guest)
        assert (await gateway.generate("r", 4))[1]["finish_reason"] == "length"


async def test_half_written_weights_are_not_served_as_version_0() -> None:
    engine = failing()
    engine.in_doubt = True
    async with gateway_on(engine, **BRIEF) as gateway:
        assert (await gateway.publish(1))[0] == 503
        status, reply = await gateway.post("/v1/jobs/base/activate", {})
        assert (status, "in doubt" in reply["error"]) == (503, True), reply
        status, reply = await gateway.post("/inference/v1/generate", TURN, BASE)
        assert (status, "restart the engine" in str(reply)) == (503, True), reply
        assert engine.open == 0
