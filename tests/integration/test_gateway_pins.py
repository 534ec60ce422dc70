"""Pins on versions and numerics on every route: held for the client's patience, and then a 409."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest

from harvester.contracts.ids import JobId
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_renderer import FakeRenderer
from tests.integration.gateway_in_process import (
    PROMPT,
    GatewayInProcess,
    Site,
    continued,
    gateway_on,
)

ROUTES = ("/inference/v1/generate", "/v1/chat/completions", "/v1/completions", "/generate")
TOKENS = 4


def fake(*, step_s: float = 0.001, release: str = "0.32.0+fake") -> FakeEngine:
    engine = FakeEngine(step_s=step_s, epoch=None)
    engine.release = release
    return engine


def body_for(route: str, **more: Any) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 1.0}
    match route:
        case "/inference/v1/generate":
            sampling["max_tokens"] = TOKENS
            body = {"request_id": "r", "token_ids": PROMPT, "sampling_params": sampling}
        case "/v1/chat/completions":
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS}
        case "/v1/completions":
            body = {"prompt": "hi", "max_tokens": TOKENS}
        case _:
            sampling["max_new_tokens"] = TOKENS
            body = {"input_ids": PROMPT, "sampling_params": sampling}
    return body | more


@asynccontextmanager
async def served(*engines: FakeEngine, **settings: Any) -> AsyncIterator[GatewayInProcess]:
    renderer = Site()
    await renderer.serve(FakeRenderer().app())
    try:
        async with gateway_on(*engines, renderers=[renderer.url], **settings) as gateway:
            yield gateway
    finally:
        await renderer.close()


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - of objects without an event
            await asyncio.sleep(0.005)


def deferred_turns(gateway: GatewayInProcess) -> int:
    return gateway.scheduler.dispatcher.policy.deferred_turns_of(JobId("job"))


@pytest.mark.parametrize("route", ROUTES)
async def test_a_pin_of_slime_and_miles_waits_for_its_version_on_every_route(route) -> None:
    async with served(fake()) as gateway:
        await gateway.publish(1)
        pin = {"min_version": 2, "exact_version": None}
        turn = asyncio.create_task(gateway.post(route, body_for(route, weight_version=pin)))
        await until(lambda: deferred_turns(gateway) == 1)
        await gateway.publish(2)
        status, reply = await turn
    assert status == 200
    versions = reply["meta_info"] if route == "/generate" else reply
    assert (versions["weight_version_start"], versions["weight_version_end"]) == (2, 2)
    of_choice = versions if route == "/generate" else reply["choices"][0]
    assert of_choice["weight_versions"] == [{"version": "2", "start": 0, "end": TOKENS}]


@pytest.mark.parametrize("route", ROUTES)
async def test_an_unmet_pin_is_a_409_to_retry_and_one_that_is_gone_a_410(route) -> None:
    async with served(fake()) as gateway, aiohttp.ClientSession() as session:
        await gateway.publish(3)

        async def refused(**pin: Any) -> tuple[int, str | None]:
            body = body_for(route, weight_version=pin)
            async with session.post(gateway.url + route, json=body) as response:
                assert "job is at 3" in str((await response.json())["error"])
                return response.status, response.headers.get("Retry-After")

        assert await refused(exact=4, wait_s=0) == (409, "1")
        assert await refused(min_version=4, wait_s=0.1) == (409, "1")
        assert await refused(exact_version=2) == (410, None)


async def test_openais_client_retries_a_pin_that_is_not_met_yet_and_no_other() -> None:
    async with served(fake()) as gateway:
        await gateway.publish(1)
        url = f"{gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=3) as client:

            async def complete(**pin: Any) -> dict[str, Any]:
                more = {"weight_version": {"wait_s": 0, **pin}}
                reply = await client.completions.create(
                    model="job", prompt="hi", max_tokens=TOKENS, extra_body=more
                )
                return reply.model_dump()

            turn = asyncio.create_task(complete(min_version=2))
            await until(lambda: gateway.scheduler.ledgers["job"].counters.refused == 1)
            await gateway.publish(2)
            assert (await turn)["weight_version_start"] == 2
            with pytest.raises(openai.APIStatusError) as gone:
                await complete(exact_version=1)
            assert gone.value.status_code == 410
            assert gateway.scheduler.ledgers["job"].counters.refused == 2


async def test_the_gateways_own_patience_holds_where_a_request_names_none() -> None:
    async with gateway_on(fake(), timeouts={"pin_s": 0.2}) as gateway:
        await gateway.publish(1)
        assert (await gateway.generate("r", 3, weight_version={"minimum": 2}))[0] == 409
        status, reply = await gateway.generate("r", 3, weight_version={"wait_s": 3601})
    assert (status, "wait_s" in reply["error"]["message"]) == (400, True)


async def test_a_hold_outlasts_the_wait_for_an_engine_and_ends_with_its_client() -> None:
    timeouts = {"queue_s": 0.2, "rejoin_s": 0.01}
    async with gateway_on(fake(), timeouts=timeouts) as gateway:
        await gateway.publish(1)
        turn = asyncio.create_task(gateway.generate("r", 3, weight_version={"exact": 2}))
        await until(lambda: deferred_turns(gateway) == 1)
        done, _ = await asyncio.wait((turn,), timeout=0.6)
        assert not done
        turn.cancel()
        await until(lambda: deferred_turns(gateway) == 0)


async def test_a_lag_counts_from_the_newest_version_at_the_turns_arrival() -> None:
    engine = fake(step_s=0.02)
    async with gateway_on(engine) as gateway:
        await gateway.publish(4)
        turn = asyncio.create_task(gateway.generate("r", 40, weight_version={"max_lag": 1}))
        await until(lambda: engine.open == 1)
        (running,) = gateway.scheduler.fleet.members["e0"].running
        assert (running.turn.pin.minimum, running.turn.pin.exact) == (3, None)
        # The same body again is the same turn, whatever was published meanwhile.
        await gateway.publish(6)
        again = asyncio.create_task(gateway.generate("r", 40, weight_version={"max_lag": 1}))
        (status, choice), (_, same) = await turn, await again
    assert status == 200
    assert choice == same
    assert [span["version"] for span in choice["spans"]] == [4, 6]


async def test_a_streams_last_event_says_the_versions() -> None:
    async with gateway_on(fake()) as gateway, aiohttp.ClientSession() as session:
        await gateway.publish(1)
        url, body = gateway.url + ROUTES[0], body_for(ROUTES[0], stream=True)
        async with session.post(url, json=body) as response:
            events = (await response.text()).split("\n\n")
    assert '"weight_version_start":1,"weight_version_end":1' in events[-3]
    assert '"weight_version_start"' not in events[0]


async def all_serve(gateway: GatewayInProcess) -> None:
    policy, members = gateway.scheduler.fleet.policy, gateway.scheduler.fleet.members
    await until(lambda: all(policy.state(engine) == "serving" for engine in members))


@pytest.mark.parametrize("equal", [True, False])
async def test_a_turn_of_equal_numerics_ends_rather_than_mix_them(equal) -> None:
    first, other = fake(step_s=0.02), fake(release="0.33.0+fake")
    timeouts = {"queue_s": 0.3, "connect_s": 0.2}
    async with gateway_on(first, other, timeouts=timeouts) as gateway:
        await all_serve(gateway)
        turn = asyncio.create_task(gateway.generate("r", 60, equal_numerics=equal))
        await until(lambda: first.open == 1)
        await until(lambda: made_tokens(gateway))
        await gateway.sites[0].close()
        status, choice = await turn
    labels = {span["numerics"] for span in choice["spans"]}
    assert choice["token_ids"] == continued(PROMPT, len(choice["token_ids"]), version=0)
    if equal:
        assert (status, choice["finish_reason"], len(labels)) == (200, "abort", 1)
        assert "with the numerics 'vllm 0.32.0+fake" in choice["fault"]
    else:
        assert (status, choice["finish_reason"], len(labels)) == (200, "length", 2)


async def test_a_turn_of_equal_numerics_goes_on_where_its_label_is() -> None:
    first, other, equal = fake(step_s=0.02), fake(release="0.33.0+fake"), fake(step_s=0.002)
    async with gateway_on(first, other, equal, timeouts={"connect_s": 0.2}) as gateway:
        await all_serve(gateway)
        turn = asyncio.create_task(gateway.generate("r", 60, equal_numerics=True))
        await until(lambda: first.open == 1)
        await until(lambda: made_tokens(gateway))
        await gateway.sites[0].close()
        status, choice = await turn
    assert (status, choice["token_ids"]) == (200, continued(PROMPT, 60, version=0))
    assert [span["engine"] for span in choice["spans"]] == ["e0", "e2"]
    assert len({span["numerics"] for span in choice["spans"]}) == 1


def made_tokens(gateway: GatewayInProcess) -> bool:
    members = gateway.scheduler.fleet.members.values()
    return any(running.tokens for member in members for running in member.running)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_label_of_numerics_chooses_the_engine_on_every_route(route) -> None:
    async with served(fake(), fake(release="0.33.0+fake")) as gateway:
        await all_serve(gateway)
        labels = {
            engine: member["numerics"]
            for engine, member in (await gateway.status())["engines"].items()
        }
        assert labels["e0"] != labels["e1"]
        for engine, label in labels.items():
            body = body_for(route, equal_numerics=label)
            if "request_id" in body:
                body["request_id"] = engine
            status, reply = await gateway.post(route, body)
            of_choice = reply["meta_info"] if route == "/generate" else reply["choices"][0]
            assert (status, of_choice["spans"][0]["engine"]) == (200, engine)
        unknown = body_for(route, equal_numerics="vllm 9", weight_version={"wait_s": 0})
        status, reply = await gateway.post(route, unknown)
    assert (status, "no engine has the numerics 'vllm 9'" in str(reply)) == (409, True)
