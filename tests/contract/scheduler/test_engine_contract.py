"""The engine behaviour that the gateway relies on. The fake passes the checks of a real vLLM.

Each check is a plain coroutine over a base URL; the tests run all of them on each engine.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import aiohttp
import pytest

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams
from scheduler.gateway.engines.engine_client import EngineClient
from scheduler.gateway.engines.engine_faults import RequestRefused
from scheduler.gateway.engines.identity import Change, HeldWeights
from scheduler.gateway.engines.stream import EngineChoice
from scheduler.gateway.policy.attempt import Attempt
from scheduler.gateway.policy.turn_ledger import TurnLedger

PROMPT = tuple(range(3, 19))


def attempt(max_tokens: int = 8, *, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Attempt:
    params = SamplingParams(max_tokens=max_tokens, **{"seed": 11, **sampling})
    request = GenerateRequest(request_id="contract", token_ids=prompt, sampling_params=params)
    turn = TurnLedger(JobId("job")).open(request, trajectory=TrajectoryId("t"))
    assert turn is not None
    return turn.begin(engine=EngineId("e"), version=WeightVersion(0), numerics="")


async def collect(client: EngineClient, asked: Attempt, name: str) -> list[EngineChoice]:
    return [choice async for choice in client.generate(asked, request_id=name, epoch=None)]


async def streams_every_token_with_its_logprob_and_a_reason_at_the_end(
    client: EngineClient,
) -> None:
    choices = await collect(client, attempt(8), "a")
    tokens = 0
    for choice in choices:
        assert choice.token_ids is not None
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [entry.token_id for entry in choice.logprobs.content] == choice.token_ids
        assert all(-9999 <= entry.logprob <= 0 for entry in choice.logprobs.content)
        tokens += len(choice.token_ids)
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason in ("length", "stop")
    assert tokens == 8 or choices[-1].finish_reason == "stop"


async def the_same_seed_says_the_same(client: EngineClient) -> None:
    said = [
        [
            token
            for choice in await collect(client, attempt(12), name)
            for token in choice.token_ids or []
        ]
        for name in ("s1", "s2")
    ]
    assert said[0] == said[1]


async def the_last_token_comes_with_the_finish_reason(client: EngineClient) -> None:
    """Otherwise a turn could have all its tokens and no end."""
    choices = await collect(client, attempt(3), "f")
    assert choices[-1].finish_reason is not None
    assert choices[-1].token_ids


async def a_stop_token_ends_the_turn_and_is_part_of_it(client: EngineClient) -> None:
    first = await collect(client, attempt(4), "p")
    tokens = [token for choice in first for token in choice.token_ids or []]
    stopped = await collect(client, attempt(4, stop_token_ids=(tokens[0],)), "q")
    assert [token for choice in stopped for token in choice.token_ids or []] == tokens[:1]
    assert stopped[-1].finish_reason == "stop"


async def a_request_that_no_engine_would_take_is_the_jobs_fault(client: EngineClient) -> None:
    with pytest.raises(RequestRefused):
        await collect(client, attempt(4, prompt=(1 << 30,)), "b")


async def leaving_a_stream_early_leaves_the_engine_ready(client: EngineClient) -> None:
    stream = client.generate(attempt(4000), request_id="c", epoch=None)
    first = await anext(stream)
    assert first.token_ids
    await stream.aclose()
    async with asyncio.timeout(30):
        assert await collect(client, attempt(4), "d")


async def says_that_it_is_healthy_and_which_vllm_it_is(client: EngineClient) -> None:
    assert await client.became() is Change.NONE
    assert await client.vllm_version()


async def says_what_fits_it_and_stays_the_same_engine(client: EngineClient) -> None:
    described = await client.switch(HeldWeights(), timeout_s=20.0)
    assert described.model
    assert described.context_tokens > len(PROMPT)
    identity = client.identity
    assert identity
    assert await collect(client, attempt(4), "e")
    assert not await client.changed()
    await client.switch(HeldWeights(), timeout_s=20.0)
    assert client.identity == identity


async def a_context_that_is_full_ends_a_turn_with_length(client: EngineClient) -> None:
    context = (await client.describe(None)).context_tokens
    prompt = tuple(each % 32 + 3 for each in range(context - 4))
    choices = await collect(client, attempt(64, prompt=prompt, seed=None, ignore_eos=True), "g")
    made = sum(len(choice.token_ids or ()) for choice in choices)
    assert made == 4
    assert choices[-1].finish_reason == "length"


CHECKS = [
    streams_every_token_with_its_logprob_and_a_reason_at_the_end,
    the_same_seed_says_the_same,
    the_last_token_comes_with_the_finish_reason,
    a_stop_token_ends_the_turn_and_is_part_of_it,
    a_request_that_no_engine_would_take_is_the_jobs_fault,
    leaving_a_stream_early_leaves_the_engine_ready,
    says_that_it_is_healthy_and_which_vllm_it_is,
    says_what_fits_it_and_stays_the_same_engine,
    a_context_that_is_full_ends_a_turn_with_length,
]


@pytest.fixture
async def client(engine_url: str) -> AsyncIterator[EngineClient]:
    async with aiohttp.ClientSession() as session:
        with closing(EngineClient(session, engine_url, connect_s=5.0)) as client:
            yield client


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_an_engine(check, client: EngineClient) -> None:
    await check(client)
