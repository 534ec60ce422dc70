"""A client of ours refuses restarted engines while the gateway is silent."""

import asyncio

import pytest
from aiohttp import web

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import WeightVersion
from harvester.contracts.wire.gateway_status import GatewayEngine
from harvester.contracts.wire.rollouts import GENERATE_ROUTE, VersionPin
from harvester.platform.backoff import RetryLimits
from scheduler.client.rollout_client import AsyncRolloutClient
from scheduler.model import EngineKind
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import Site


@pytest.mark.parametrize(
    ("version", "pin", "serves"),
    [(0, None, True), (50, None, False), (50, VersionPin(max_lag=0), False)],
)
async def test_an_engine_with_its_first_weights_serves_only_a_job_that_has_published_none(
    version: int, pin: VersionPin | None, serves: bool
) -> None:
    site = Site()
    await site.serve(FakeEngine(step_s=0.001, epoch=None).app())
    async with AsyncRolloutClient("http://127.0.0.1:1", "job", silence_s=0.1) as client:
        watch = client._watch
        watch._silence.silent = True
        watch.engines = {"e0": GatewayEngine(kind=EngineKind.DEDICATED, url=site.url)}
        watch.learned = True
        watch.version, watch.store = WeightVersion(version), "job.store" if version else ""
        turn = client.generate([4, 5, 6], {"max_tokens": 3}, weight_version=pin)
        if serves:
            assert len((await turn).token_ids) == 3
        else:
            with pytest.raises((Exhausted, TimeoutError)):
                async with asyncio.timeout(2.0):
                    await turn
    await site.close()


async def test_an_engine_whose_log_probabilities_are_not_the_policys_serves_no_turn() -> None:
    site, raw = Site(), FakeEngine(step_s=0.001, epoch=None)
    raw.logprobs_mode = "raw_logprobs"
    await site.serve(raw.app())
    dedicated, limits = {"e0": site.url}, RetryLimits(attempts_max=3, first_wait_s=0.001)
    async with AsyncRolloutClient(
        "http://127.0.0.1:1", "job", dedicated=dedicated, silence_s=0.1, retries=limits
    ) as client:
        client._watch._silence.silent = True
        with pytest.raises(Exhausted, match="--logprobs-mode processed_logprobs"):
            await client.generate([4, 5, 6], {"max_tokens": 3})
    await site.close()


async def test_a_token_beyond_the_engines_own_vocabulary_is_in_no_turn_without_the_gateway() -> (
    None
):
    site, small = Site(), FakeEngine(step_s=0.001, epoch=None)
    small.vocabulary = 1
    await site.serve(small.app())
    dedicated, limits = {"e0": site.url}, RetryLimits(attempts_max=3, first_wait_s=0.001)
    async with AsyncRolloutClient(
        "http://127.0.0.1:1", "job", dedicated=dedicated, silence_s=0.1, retries=limits
    ) as client:
        client._watch._silence.silent = True
        with pytest.raises(Exhausted, match="not below 1"):
            await client.generate([4, 5, 6], {"max_tokens": 3})
    await site.close()


async def test_a_reply_that_does_not_end_its_turn_is_not_requested_again_without_a_pause() -> None:
    site, requests = Site(), 0

    async def endless(_: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        return web.json_response({"choices": []})

    app = web.Application()
    app.router.add_post(GENERATE_ROUTE, endless)
    await site.serve(app)
    limits = RetryLimits(attempts_max=3, first_wait_s=0.001)
    async with AsyncRolloutClient(site.url, "job", fallback=False, retries=limits) as client:
        async with asyncio.timeout(30):
            with pytest.raises(Exhausted, match="does not end the turn"):
                await client.generate([4, 5, 6], {"max_tokens": 3})
    assert requests == 3
    await site.close()
