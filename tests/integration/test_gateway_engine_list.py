"""The gateway as the only engine, and the router, of a trainer that keeps a list of engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.integration.engine_list import EngineListTrainer
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_renderer import FakeRenderer
from tests.integration.gateway_in_process import (
    PROMPT,
    GatewayInProcess,
    Site,
    continued,
    gateway_on,
)

STORE = Path("/srv/weights/job.store")


def engine() -> FakeEngine:
    return FakeEngine(step_s=0.002, epoch=None)


@asynccontextmanager
async def attached(
    *engines: FakeEngine,
) -> AsyncIterator[tuple[GatewayInProcess, EngineListTrainer]]:
    """A gateway with a renderer, since the trainer rewards text, and a trainer before it."""
    renderer = Site()
    await renderer.serve(FakeRenderer().app())
    try:
        async with (
            gateway_on(*engines, renderers=[renderer.url]) as gateway,
            aiohttp.ClientSession() as session,
        ):
            trainer = EngineListTrainer(session, gateway.url, STORE)
            await trainer.attach()
            yield gateway, trainer
    finally:
        await renderer.close()


async def test_a_trainer_s_steps_are_publishes_and_its_turns_have_their_versions() -> None:
    async with attached(engine(), engine()) as (gateway, trainer):
        for version in (1, 2):
            await trainer.update(version)
            sampling = {"max_new_tokens": 4, "temperature": 1.0, "no_stop_trim": True}
            body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
            status, reply = await gateway.post("/generate", body)
            assert status == 200
            assert reply["output_ids"] == continued(PROMPT, 4, version=version)
            assert reply["meta_info"]["weight_version"] == str(version)
        assert {each["store"] for each in (await gateway.status())["jobs"].values()} == {
            "job.store"
        }


async def test_an_abort_of_all_engines_ends_every_open_turn_with_its_tokens() -> None:
    async with attached(engine()) as (gateway, trainer):
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 10_000}}
        open_turns = [asyncio.create_task(gateway.post("/generate", body)) for _ in range(3)]
        await gateway.until_tokens(2, turns=3)
        assert (await gateway.get("/v1/loads"))[1]["loads"][0]["num_reqs"] == 3
        assert await trainer.abort_until_idle() == 1
        for status, reply in await asyncio.gather(*open_turns):
            assert status == 200
            assert reply["meta_info"]["finish_reason"]["type"] == "abort"
            assert len(reply["output_ids"]) >= 2


@pytest.mark.parametrize("base", ["", "/jobs/job"])
async def test_the_gateway_is_the_only_engine_that_it_accepts(base: str) -> None:
    async with gateway_on(engine()) as gateway:
        own = gateway.url + base
        assert (await gateway.get(f"{base}/list_workers"))[1]["urls"] == [own]
        status, reply = await gateway.post(f"{base}/workers", {"url": own + "/"})
        assert (status, reply["url"]) == (200, own)
        assert (await gateway.post(f"{base}/add_worker?url={own}", {}))[0] == 200
        for path, body in (
            (f"{base}/workers", {"url": "http://10.0.0.1:30000", "worker_type": "prefill"}),
            (f"{base}/add_worker?url=http://10.0.0.1:30000", {}),
        ):
            status, reply = await gateway.post(path, body)
            assert status == 400
            assert "configuration" in reply["error"]


async def test_a_second_run_of_a_trainer_is_refused_because_versions_only_rise() -> None:
    async with attached(engine()) as (gateway, trainer):
        await trainer.update(5)
        body = {"source_dir": str(STORE), "target_version": 0}
        status, reply = await gateway.post("/pull_weights", body)
        assert status == 409
        assert "begin this run as another job" in reply["error"]
        assert (await gateway.get("/get_weight_version"))[1] == {"weight_version": "5"}


async def test_weights_of_a_path_are_not_loaded() -> None:
    async with gateway_on(engine()) as gateway:
        await gateway.publish(3)
        for body in (
            {"model_path": "/local/checkpoint"},
            {"model_path": "/local/checkpoint", "weight_version": "2"},
        ):
            status, reply = await gateway.post("/update_weights_from_disk", body)
            assert status == 400
            assert "is at 3" in reply["error"]
        for body in (
            {"source_dir": "..", "target_version": 4},
            {"source_dir": "/", "target_version": 4},
            {"source_dir": "/srv/weights/job.store", "target_version": -1},
            {"source_dir": "/srv/weights/job.store"},
        ):
            assert (await gateway.post("/pull_weights", body))[0] == 400
        assert (await gateway.get("/get_weight_version"))[1] == {"weight_version": "3"}


async def test_a_trainer_gets_the_candidates_of_top_p_that_its_loss_masks_by() -> None:
    fake = engine()
    fake.masks = True
    sampling = {"max_new_tokens": 3, "top_p": 0.9}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    sampling["custom_params"] = {"return_top_p_token_ids": True}
    async with attached(fake) as (gateway, _):
        status, reply = await gateway.post("/generate", body)
        assert status == 200
        ids, meta = reply["output_ids"], reply["meta_info"]
        assert meta["top_p_token_ids"] == [each for token in ids for each in (token, 0)]
        assert meta["top_p_token_offsets"] == [0, 2, 4, 6]
        sampling["custom_params"] = {"return_top_p_token_ids": True, "more": 1}
        status, reply = await gateway.post("/generate", body)
        assert status == 400
        assert "custom_params" in reply["error"]
