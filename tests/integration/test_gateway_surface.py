"""Scores of prompts, chosen candidates, masks and routed experts, also over a move."""

from typing import Any

import aiohttp
import pytest

from tests.integration.fake_engine import VOCABULARY, FakeEngine
from tests.integration.gateway_in_process import PROMPT, gateway_on

SCORES = [None, *({str(t): -t / VOCABULARY} for t in PROMPT[1:])]


def engine(*, step_s: float = 0.001) -> FakeEngine:
    made = FakeEngine(step_s=step_s, epoch=None, context=4096)
    made.masks = made.routes_experts = True
    return made


def values(reply: dict[str, Any]) -> list[Any]:
    return [
        each and {token: value["logprob"] for token, value in each.items()}
        for each in reply["prompt_logprobs"]
    ]


async def generate(gateway: Any, max_tokens: int = 4, **sampling: Any) -> tuple[int, Any]:
    params = {"max_tokens": max_tokens, **sampling}
    body = {"request_id": "r", "token_ids": PROMPT, "sampling_params": params}
    status, reply = await gateway.post("/inference/v1/generate", body)
    return status, reply


async def test_a_prompt_is_scored_once_however_many_samples_it_has() -> None:
    one = engine()
    async with gateway_on(one) as gateway:
        status, reply = await generate(gateway, n=3, prompt_logprobs=0)
    assert (status, one.scored) == (200, 1)
    assert values(reply) == SCORES
    assert len(reply["choices"]) == 3


async def test_a_turn_that_moves_keeps_the_scores_of_its_prompt_and_its_masks() -> None:
    engines = [engine(step_s=0.005), engine(step_s=0.005)]
    engines[0].breaks_after = engines[1].breaks_after = 10
    async with gateway_on(*engines) as gateway:
        status, reply = await generate(gateway, 16, prompt_logprobs=0)
    (choice,) = reply["choices"]
    assert (status, sum(one.scored for one in engines)) == (200, 1)
    assert values(reply) == SCORES
    assert choice["sampling_mask"] == [[token, 0] for token in choice["token_ids"]]
    assert len(choice["token_ids"]) == 16
    assert choice["routed_experts"] is None, "the rows of the first engine are gone"


async def test_scores_are_of_the_engine_of_the_first_token() -> None:
    engines = [engine(), engine()]
    for one in engines:
        one.breaks_after = 1
    async with gateway_on(*engines) as gateway:
        status, reply = await generate(gateway, prompt_logprobs=0)
        (choice,) = reply["choices"]
        first = engines[int(choice["spans"][0]["engine"][1:])]
    assert status == 200
    assert first.scored >= 1
    assert sum(one.scored for one in engines) == 1 + sum(1 - one.breaks for one in engines)


async def test_a_turn_of_one_attempt_has_the_engines_routed_experts() -> None:
    async with gateway_on(engine()) as gateway:
        _, reply = await generate(gateway)
    assert reply["choices"][0]["routed_experts"] == f"{len(PROMPT) + 4 - 1} rows"


async def test_every_chosen_candidate_comes_back_beside_the_sampled_token() -> None:
    async with gateway_on(engine()) as gateway:
        _, reply = await generate(gateway, logprob_token_ids=[250, 251])
    for entry in reply["choices"][0]["logprobs"]["content"]:
        ids = [each["token_id"] for each in entry["top_logprobs"]]
        assert ids[0] == entry["token_id"]
        assert {250, 251} <= set(ids)


async def test_an_engine_that_returns_no_scores_refuses_the_request_by_name() -> None:
    one = engine()
    async with gateway_on(one) as gateway:
        status, reply = await generate(gateway, prompt_logprob_token_ids=[[1]])
    assert status == 400, reply


async def test_stream_interval_is_the_least_of_each_event_between_first_and_last() -> None:
    async with gateway_on(engine(step_s=0.0)) as gateway:
        params = {"max_tokens": 20, "stream_interval": 6}
        body = {"token_ids": PROMPT, "sampling_params": params, "stream": True}
        url = f"{gateway.url}/inference/v1/generate"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            raw = (await response.read()).decode()
    events = [each for each in raw.split("\n\n") if each and "[DONE]" not in each]
    assert 2 <= len(events) <= 5


@pytest.mark.parametrize("max_tokens", [None, "absent"])
async def test_a_request_without_max_tokens_fills_the_largest_context(max_tokens: Any) -> None:
    engines = [FakeEngine(step_s=0.0, epoch=None, context=size) for size in (16, 40)]
    async with gateway_on(*engines) as gateway:
        await gateway.until(lambda: gateway.scheduler.registry.context_tokens() == 40)
        params = {} if max_tokens == "absent" else {"max_tokens": max_tokens}
        body = {"token_ids": PROMPT, "sampling_params": params}
        status, reply = await gateway.post("/inference/v1/generate", body)
    assert (status, len(reply["choices"][0]["token_ids"])) == (200, 40 - len(PROMPT))


@pytest.mark.parametrize(("release", "status"), [("0.31.0", 400), ("0.32.0", 200)])
async def test_a_grammar_beside_a_parser_is_refused_where_vllm_would_misplace_it(
    release: str, status: int
) -> None:
    one = engine()
    one.release = release
    async with gateway_on(one) as gateway:
        body = {
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 2, "structured_outputs": {"regex": "a"}},
            "reasoning_parser_kwargs": {"chat_template_kwargs": {}},
        }
        got, reply = await gateway.post("/inference/v1/generate", body)
        del body["sampling_params"]["structured_outputs"]
        plain, _ = await gateway.post("/inference/v1/generate", body)
    assert (got, plain) == (status, 200), reply
    assert status == 200 or "reasoning_parser_kwargs" in reply["error"]["message"]
