"""An engine that is not the one a version was given to: no token of it counts as that version."""

import asyncio

import pytest

from scheduler.gateway.engines.engine_client import EngineClient
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import (
    PROMPT,
    GatewayInProcess,
    Site,
    continued,
    gateway_on,
)

SWITCH = (
    "/pause",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
)


def fake(*, stock: bool = False, step_s: float = 0.001, context: int = 1 << 20) -> FakeEngine:
    return FakeEngine(step_s=step_s, epoch=None, stock=stock, context=context)


@pytest.fixture
def only_replies_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway does not find a change out between two turns."""

    async def never(_client: EngineClient, **_: bool) -> bool:
        return False

    monkeypatch.setattr(EngineClient, "changed", never)


async def until(gateway: GatewayInProcess, engine: str, state: str) -> None:
    async with asyncio.timeout(30):
        while (await gateway.status())["engines"][engine]["state"] != state:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def assert_true_to_its_spans(choice: dict, prompt: list[int] = PROMPT) -> None:
    said = list(prompt)
    for span in choice["spans"]:
        count = span["end"] - span["start"]
        expected = continued(said, count, version=span["version"])
        assert choice["token_ids"][span["start"] : span["end"]] == expected, span
        said += expected


@pytest.mark.parametrize("stock", [True, False])
async def test_an_engine_under_two_urls_is_one_engine(stock: bool) -> None:
    """An update under the one changed the weights under the turns of the other: 300 tokens of
    version 2 as tokens of version 1, where the engine's replies do not show it."""
    engine, site = fake(stock=stock), Site()
    await site.serve(engine.app())
    urls = site.url, site.url.replace("127.0.0.1", "localhost")
    async with gateway_on(*urls, versions={"retry_s": 0.1}) as gateway:
        policy = gateway.scheduler.fleet.policy
        await gateway.until(
            lambda: {policy.state("e0"), policy.state("e1")} == {"serving", "failed"}
        )
        # The one that was asked first.
        served, other = sorted(("e0", "e1"), key=lambda name: policy.state(name) == "failed")
        fault = (await gateway.status())["engines"][other]["fault"]
        assert fault == f"it is the process of engine {served}: list it once, with one URL"
        turns = [asyncio.create_task(gateway.generate(f"t{at}", 9)) for at in range(12)]
        for status, choice in await asyncio.gather(*turns):
            assert (status, {span["engine"] for span in choice["spans"]}) == (200, {served})
    await site.close()


@pytest.mark.parametrize("identity", ["a1\r\nX-Other: 1.0", "\u00e9.0", "a" * 300 + ".0"])
async def test_an_engine_whose_identity_is_no_value_of_a_header_gets_no_turn(identity) -> None:
    odd = fake()
    odd.reported_identity = identity
    async with gateway_on(odd, fake()) as gateway:
        await until(gateway, "e1", "serving")
        await until(gateway, "e0", "failed")
        for turn in range(6):
            assert (await gateway.generate(f"t{turn}", 5))[0] == 200
        fault = (await gateway.status())["engines"]["e0"]["fault"]
        assert "printable ASCII" in fault
        assert odd.models == []


@pytest.mark.parametrize("stock", [False, True], ids=["with identity", "stock"])
async def test_an_engine_replaced_while_idle_labels_no_token(only_replies_tell, stock) -> None:
    async with gateway_on(fake(stock=stock)) as gateway:
        await gateway.publish(1)
        await gateway.generate("before", 5)
        await gateway.sites[0].serve(fake(stock=stock).app())
        for turn in range(30):
            status, choice = await gateway.generate(f"after{turn}", 5, weight_version={"exact": 1})
            assert status == 200
            assert choice["token_ids"] == continued(PROMPT, 5, version=1)


@pytest.mark.parametrize("stock", [False, True], ids=["with identity", "stock"])
async def test_an_engine_replaced_mid_stream_costs_the_turn_nothing(stock) -> None:
    slow = fake(stock=stock, step_s=0.01)
    async with gateway_on(slow, fake(stock=stock)) as gateway:
        await gateway.publish(1)
        turns = [asyncio.create_task(gateway.generate(f"t{each}", 60)) for each in range(6)]
        async with asyncio.timeout(30):
            while not slow.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await gateway.sites[0].serve(fake(stock=stock).app())
        for status, choice in await asyncio.gather(*turns):
            assert (status, choice["finish_reason"]) == (200, "length")
            assert choice["token_ids"] == continued(PROMPT, 60, version=1)


async def test_weights_changed_by_another_hand_mid_stream_end_the_attempt(
    only_replies_tell,
) -> None:
    engine = fake(step_s=0.01)
    async with gateway_on(engine) as gateway:
        await gateway.publish(1)
        turn = asyncio.create_task(gateway.generate("t", 60))
        async with asyncio.timeout(30):
            while not engine.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        engine.weight_calls += 1
        engine.version = 9
        status, choice = await turn
        assert (status, choice["finish_reason"]) == (200, "length")
        assert choice["token_ids"] == continued(PROMPT, 60, version=1)


@pytest.mark.parametrize("stock", [False, True], ids=["with identity", "stock"])
@pytest.mark.parametrize("route", SWITCH)
async def test_an_engine_replaced_during_its_update_is_updated_again(route, stock) -> None:
    engine = fake(stock=stock)
    async with gateway_on(engine, versions={"retry_s": 0.05}) as gateway:
        engine.replaced_after = route
        assert (await gateway.publish(1))[0] == 200
        status, choice = await gateway.generate("t", 10, weight_version={"exact": 1})
        assert status == 200
        assert choice["token_ids"] == continued(PROMPT, 10, version=1)


async def test_a_replaced_idle_engine_is_found_and_updated() -> None:
    async with gateway_on(fake()) as gateway:
        await gateway.publish(1)
        other = fake()
        await gateway.sites[0].serve(other.app())
        async with asyncio.timeout(30):
            while other.version != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await until(gateway, "e0", "serving")


async def test_an_engine_without_identity_serves_no_version(only_replies_tell) -> None:
    mute = fake(stock=True)
    mute.mute = True
    async with gateway_on(mute, timeouts={"publish_s": 0.5}) as gateway:
        status, choice = await gateway.generate("base", 5)
        assert (status, choice["spans"][0]["version"]) == (200, 0)
        status, reply = await gateway.publish(1)
        assert status == 503
        assert "IdentityMiddleware" in reply["error"]
        engine = (await gateway.status())["engines"]["e0"]
        assert (engine["state"], engine["identity"]) == ("failed", "")


async def test_weights_of_an_earlier_gateway_are_not_the_first_weights() -> None:
    engine = fake()
    engine.version, engine.updated = 5, {"store": "job.store", "version": 5}
    async with gateway_on(engine, versions={"retry_s": 0.05}) as gateway:
        await until(gateway, "e0", "failed")
        assert "holds job.store 5" in (await gateway.status())["engines"]["e0"]["fault"]
        assert (await gateway.publish(6))[0] == 200
        _, choice = await gateway.generate("t", 5)
        assert choice["token_ids"] == continued(PROMPT, 5, version=6)


async def test_an_engine_whose_log_probabilities_are_not_the_policys_serves_no_turn() -> None:
    raw = fake()
    raw.logprobs_mode = "raw_logprobs"
    async with gateway_on(raw, timeouts={"queue_s": 0.5}) as gateway:
        await until(gateway, "e0", "failed")
        status, reply = await gateway.generate("t", 2)
    assert status == 503
    assert "start it with --logprobs-mode processed_logprobs" in reply["error"]["message"]


async def test_an_engine_that_computes_something_else_does_not_join() -> None:
    odd = fake()
    odd.vocabulary = 300
    async with gateway_on(fake(), odd) as gateway:
        await asyncio.wait(
            {asyncio.create_task(until(gateway, e, "serving")) for e in ("e0", "e1")},
            return_when=asyncio.FIRST_COMPLETED,
        )
        async with asyncio.timeout(30):
            while True:
                engines = (await gateway.status())["engines"]
                if {engine["state"] for engine in engines.values()} == {"serving", "failed"}:
                    break
                await asyncio.sleep(0.02)
        (fault,) = (engine["fault"] for engine in engines.values() if engine["fault"])
        assert fault.startswith("vocabulary")


async def test_weights_changed_by_another_hand_are_no_turns_fault() -> None:
    """A second gateway that publishes to the same engine acts like this."""
    engines = [fake(), fake()]
    for engine in engines:
        engine.holds_at = 12
    async with gateway_on(*engines) as gateway:
        await gateway.publish(1)
        turns = [
            asyncio.create_task(gateway.generate(f"t{n}", 12, prompt=[1, n % 2])) for n in range(12)
        ]
        async with asyncio.timeout(30):
            while sum(engine.open for engine in engines) < 12:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        engines[0].weight_calls += 1
        async with asyncio.timeout(30):
            while engines[0].calls.count("/update_weights") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert gateway.scheduler.blame.policy.idle
        for engine in engines:
            engine.weight_calls += 1
            engine.holds_at = 0
        for status, choice in await asyncio.gather(*turns):
            assert (status, choice["finish_reason"]) == (200, "length")
        assert gateway.scheduler.blame.policy.idle


async def test_an_engine_with_two_owners_is_named_and_left_alone_for_longer(caplog) -> None:
    engine = fake()
    async with gateway_on(engine) as gateway:
        await gateway.publish(1)
        for updates in range(2, 4):
            engine.weight_calls += 1
            async with asyncio.timeout(30):
                while (await gateway.status())["engines"]["e0"]["up"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                told = (await gateway.status())["engines"]["e0"]
                while engine.calls.count("/update_weights") < updates:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                while not (await gateway.status())["engines"]["e0"]["version"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert "let one scheduler own the engine" in told["fault"], "while it is left alone"
        said = [each for each in caplog.messages if "let one scheduler own" in each]
        assert len(said) == 2, "one for each loss"
