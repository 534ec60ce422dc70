"""Requests that are refused: at once where no engine is needed for it, in one plain sentence."""

import asyncio

import pytest

from harvester.contracts.errors import ConfigError
from harvester.contracts.wire.engines import EngineDescription
from scheduler import AsyncRolloutClient
from tests.integration.conftest import FakeAgent
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, GatewayInProcess, gateway_on

TEXTS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


def fake() -> FakeEngine:
    return FakeEngine(step_s=0.001, epoch=None)


async def described(gateway: GatewayInProcess) -> None:
    await gateway.until(gateway.scheduler.registry.models)


@pytest.mark.parametrize("route", TEXTS)
async def test_a_text_that_no_engine_could_serve_is_refused_at_once_while_none_is_up(
    route: str,
) -> None:
    async with gateway_on(fake()) as gateway:
        await described(gateway)
        await gateway.sites[0].close()
        async with asyncio.timeout(30):
            status, reply = await gateway.post(route, TEXTS[route] | {"model": "other"})
            assert (status, reply["error"]["code"]) == (404, 404)
            assert "'other' is not what job job trains" in reply["error"]["message"]
            pins = {"weight_version": {"exact": 3, "minimum": 5}}
            status, reply = await gateway.post(route, TEXTS[route] | pins)
            assert (status, "older than minimum" in reply["error"]["message"]) == (400, True)


async def test_a_model_that_an_engine_to_come_may_have_is_refused_for_now_only() -> None:
    async with gateway_on("http://127.0.0.1:9", timeouts={"queue_s": 0.3}) as gateway:
        status, reply = await gateway.generate("r", 2, model="other")
        assert (status, "known yet" in reply["error"]["message"]) == (503, True)
        for route, text in TEXTS.items():
            status, reply = await gateway.post(route, text | {"model": "other"})
            assert (status, "no dedicated engine is up" in reply["error"]["message"]) == (503, True)


async def test_a_guest_s_model_is_known_as_soon_as_it_is_offered(fake_agent: FakeAgent) -> None:
    """Without a dedicated engine, and before its first lease."""
    fake_agent.offered = False
    settings = {
        "agents": [{"id": "agent", "url": fake_agent.url}],
        "capacity_period_s": 0.05,
        "timeouts": {"queue_s": 0.3},
    }
    async with gateway_on(**settings) as gateway:
        status, reply = await gateway.generate("r0", 2, model="guest")
        assert (status, "known yet" in reply["error"]["message"]) == (503, True)
        fake_agent.engine, fake_agent.offered = EngineDescription(model="guest"), True
        await gateway.until(gateway.scheduler.registry.models)
        assert (await gateway.generate("r1", 2, model="other"))[0] == 404
        status, reply = await gateway.generate("r2", 2, model="guest")
        assert (status, "known yet" in str(reply)) == (503, False), "no engine at that address"


async def test_a_token_request_for_another_model_gets_vllm_s_status() -> None:
    async with gateway_on(fake()) as gateway:
        await described(gateway)
        status, reply = await gateway.generate("r", 2, model="another")
        assert (status, reply["error"]["type"]) == (404, "NotFoundError")
        assert "model: 'another'" in reply["error"]["message"]
        assert (await gateway.generate("r", 2, model="job"))[0] == 200


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"max_new_tokens": 4}, "max_new_tokens: send it in sampling_params"),
        ({"sampling_params": {"max_tokens": 4}}, "SGLang's name is max_new_tokens"),
        ({"sampling_params": {"mystery": 4}}, "sampling_params.mystery: not offered"),
    ],
)
async def test_a_field_of_another_place_or_dialect_is_refused_with_the_right_one(
    more: dict[str, object], says: str
) -> None:
    """Left out instead, it would silently have its default."""
    async with gateway_on(fake()) as gateway:
        status, reply = await gateway.post("/generate", {"input_ids": PROMPT} | more)
        assert (status, says in str(reply)) == (400, True)


async def test_an_engine_s_refusal_reaches_the_client_as_one_sentence() -> None:
    engine = fake()
    engine.answers = {str(PROMPT[0]): 400}
    async with (
        gateway_on(engine) as gateway,
        AsyncRolloutClient(gateway.url, "job", fallback=False) as client,
    ):
        status, reply = await gateway.generate("r", 2)
        assert (status, reply["error"]["message"]) == (400, "not this one")
        with pytest.raises(ConfigError, match=r"generate: 400: not this one$"):
            await client.generate(PROMPT, {"max_tokens": 2})
