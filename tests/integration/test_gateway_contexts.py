"""Engines of unlike contexts: no turn ends early, or is refused, because of where it was put."""

import asyncio

import pytest

from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, continued, gateway_on

SMALL, LARGE = 40, 200


def fake(context: int, *, step_s: float = 0.001, stock: bool = False) -> FakeEngine:
    return FakeEngine(step_s=step_s, epoch=None, context=context, stock=stock)


async def serving(gateway, *engines: str) -> None:
    async with asyncio.timeout(30):
        while True:
            status = (await gateway.status())["engines"]
            if all(status[engine]["state"] == "serving" for engine in engines):
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("stock", [False, True], ids=["with description", "stock"])
async def test_no_turn_ends_short_and_no_prompt_is_refused_beside_a_smaller_engine(stock) -> None:
    async with gateway_on(fake(LARGE, stock=stock), fake(SMALL, stock=stock)) as gateway:
        await serving(gateway, "e0", "e1")
        long = [gateway.generate(f"x{each}", 100) for each in range(12)]
        prompts = [gateway.generate(f"y{each}", 10, prompt=[1] * 60) for each in range(12)]
        short = [gateway.generate(f"z{each}", 10) for each in range(12)]
        for status, choice in await asyncio.gather(*long):
            assert (status, choice["finish_reason"], len(choice["token_ids"])) == (
                200,
                "length",
                100,
            )
        for status, choice in await asyncio.gather(*prompts):
            assert (status, len(choice["token_ids"])) == (200, 10)
        engines = {choice["spans"][0]["engine"] for _, choice in await asyncio.gather(*short)}
        assert engines == {"e0", "e1"}


async def test_a_turn_whose_engine_is_lost_keeps_its_tokens_and_waits_for_a_large_one() -> None:
    large = fake(LARGE, step_s=0.005)
    async with gateway_on(large, fake(SMALL)) as gateway:
        await serving(gateway, "e0", "e1")
        turn = asyncio.create_task(gateway.generate("t", 100))
        async with asyncio.timeout(30):
            while not large.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await gateway.sites[0].serve(fake(LARGE).app())
        status, choice = await turn
        assert (status, choice["finish_reason"]) == (200, "length")
        assert choice["token_ids"] == continued(PROMPT, 100, version=0)


async def test_a_turn_that_fits_no_engine_is_refused_with_the_limit_at_once() -> None:
    large = fake(LARGE)
    async with gateway_on(large, fake(SMALL)) as gateway:
        await serving(gateway, "e0", "e1")
        status, reply = await gateway.generate("t", LARGE)
        assert status == 400
        assert str(LARGE) in reply["error"]["message"]
        assert large.models == []
        assert (await gateway.generate("u", LARGE - len(PROMPT)))[0] == 200


@pytest.mark.parametrize("told", [0, 10 * LARGE], ids=["says nothing", "says too much"])
async def test_a_length_that_is_the_engines_is_continued_on_a_larger_one(told) -> None:
    small = fake(SMALL)
    small.told_context = told
    async with gateway_on(small, fake(LARGE), routing={"affinity_ratio": 1.0}) as gateway:
        await serving(gateway, "e0", "e1")
        turns = [gateway.generate(f"t{each}", 100) for each in range(12)]
        for status, choice in await asyncio.gather(*turns):
            assert (status, choice["finish_reason"]) == (200, "length")
            assert choice["token_ids"] == continued(PROMPT, 100, version=0)
        assert small.models
        engine = (await gateway.status())["engines"]["e0"]
        assert engine["context_tokens"] == SMALL


async def test_a_false_length_costs_no_turn_and_shrinks_no_context() -> None:
    engine = fake(LARGE)
    async with gateway_on(engine) as gateway:
        await serving(gateway, "e0")
        engine.false_lengths = 2
        for each in range(3):
            status, choice = await gateway.generate(f"t{each}", 100)
            assert (status, choice["finish_reason"]) == (200, "length")
            assert choice["token_ids"] == continued(PROMPT, 100, version=0)
        assert (await gateway.status())["engines"]["e0"]["context_tokens"] == LARGE


@pytest.mark.parametrize("told", [0, 10 * LARGE], ids=["says nothing", "says too much"])
async def test_a_context_that_ends_a_turn_everywhere_is_no_length_of_the_clients(told) -> None:
    small = fake(SMALL)
    small.told_context = told
    async with gateway_on(small) as gateway:
        await serving(gateway, "e0")
        status, choice = await gateway.generate("t", 100)
        assert (status, choice["finish_reason"]) == (200, "abort")
        assert choice["token_ids"] == continued(PROMPT, SMALL - len(PROMPT), version=0)
        assert str(SMALL) in choice["fault"]
        assert (await gateway.generate("u", 100))[0] == 400


@pytest.mark.parametrize("told", [0, 10 * LARGE], ids=["says nothing", "says too much"])
async def test_prompts_that_a_false_context_refuses_are_served_elsewhere_and_come_back_no_more(
    told,
) -> None:
    small = fake(SMALL)
    small.told_context = told
    async with gateway_on(small, fake(LARGE), routing={"affinity_ratio": 1.0}) as gateway:
        await serving(gateway, "e0", "e1")
        prompt = [1] * (SMALL + 20)
        refused = []
        for wave in range(2):
            turns = [gateway.generate(f"{wave}.{each}", 10, prompt=prompt) for each in range(12)]
            for status, choice in await asyncio.gather(*turns):
                assert (status, choice["finish_reason"]) == (200, "length")
                assert choice["token_ids"] == continued(prompt, 10, version=0)
            refused.append(len(small.models))
        assert refused[0] == refused[1] > 0
        engine = (await gateway.status())["engines"]["e0"]
        assert engine["context_tokens"] == len(prompt) + 10 - 1
        status, choice = await gateway.generate("short", 10)
        assert (status, len(choice["token_ids"])) == (200, 10)


async def test_a_prompt_that_every_false_context_refuses_ends_with_the_engine_s_reason() -> None:
    engines = [fake(SMALL), fake(SMALL)]
    for each in engines:
        each.told_context = 10 * LARGE
    async with gateway_on(*engines) as gateway:
        await serving(gateway, "e0", "e1")
        status, reply = await gateway.generate("t", 10, prompt=[1] * (SMALL + 20))
        assert (status, f"max_model_len {SMALL}" in reply["error"]["message"]) == (400, True)
        assert [len(each.models) for each in engines] == [1, 1]


async def test_words_of_a_context_in_another_refusal_shrink_no_engine() -> None:
    """They may be the request's own: a grammar that the engine quotes."""
    quoting = fake(LARGE)
    async with gateway_on(quoting, fake(LARGE), routing={"affinity_ratio": 1.0}) as gateway:
        await serving(gateway, "e0", "e1")
        first = [gateway.generate(f"s{each}", 20) for each in range(12)]
        assert {status for status, _ in await asyncio.gather(*first)} == {200}
        quoting.answers = {str(PROMPT[0]): 400}
        quoting.answer_words = "the grammar 'maximum context length' has no rule"
        turns = [gateway.generate(f"t{each}", 2) for each in range(12)]
        assert {status for status, _ in await asyncio.gather(*turns)} == {200}
        assert (await gateway.status())["engines"]["e0"]["context_tokens"] == LARGE


async def test_samples_that_fit_no_engine_are_refused_before_one_is_begun() -> None:
    async with gateway_on(fake(LARGE)) as gateway:
        await serving(gateway, "e0")
        sampling = {"n": 64}
        status, reply = await gateway.generate("t", LARGE, sampling=sampling)
        assert (status, str(LARGE) in reply["error"]["message"]) == (400, True)
        assert gateway.scheduler.ledgers["job"].counters.started == 0


async def test_words_of_a_context_that_a_request_says_itself_prove_no_engine_short() -> None:
    """They ask for more than any turn before had, so that nothing speaks for the engine."""
    quoting = fake(LARGE)
    quoting.answers = {str(PROMPT[0]): 400}
    quoting.answer_words = "the salt 'maximum context length' is none"
    async with gateway_on(quoting, fake(LARGE), routing={"affinity_ratio": 1.0}) as gateway:
        await serving(gateway, "e0", "e1")
        salt = {"cache_salt": "maximum context length"}
        turns = [gateway.generate(f"t{each}", 20, **salt) for each in range(12)]
        assert {status for status, _ in await asyncio.gather(*turns)} == {200, 400}
        assert (await gateway.status())["engines"]["e0"]["context_tokens"] == LARGE
