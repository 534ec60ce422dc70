"""A rollout server of verl over a gateway, as a real Ray actor, and under verl's own classes."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from harvester.contracts.errors import Exhausted
from scheduler.client import verl_server
from tests.integration.conftest import Served
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, continued, gateway_on

pytestmark = [
    pytest.mark.ray,
    # Ray's own, on a machine without an accelerator and when its processes end.
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ANSWER_S = 60.0
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
Start = Callable[..., Served]


@pytest.fixture
def server(ray_cluster: None, fake_engine: Start, gateway: Start) -> Iterator[Any]:
    service = gateway(fake_engine(step_s=0.01), fake_engine(step_s=0.01))
    handle = verl_server.started(service.url, "job", prompt_length=4000, response_length=12)
    yield handle
    ray.kill(handle)


def answer(reference: Any) -> Any:
    return ray.get(reference, timeout=ANSWER_S)


def test_a_turn_has_verl_s_fields(server: Any) -> None:
    given = SAMPLING | {"logprobs": True}
    output = answer(
        server.generate.remote(
            request_id="r",
            prompt_ids=PROMPT,
            sampling_params=given,
            image_data=None,
            video_data=None,
            priority=1,
        )
    )
    assert output.token_ids == continued(PROMPT, 12, version=0)
    assert len(output.log_probs) == 12
    assert (output.stop_reason, output.num_preempted) == ("completed", 0)
    assert output.routed_experts is None
    assert output.extra_fields == dict.fromkeys(
        ("global_steps", "min_global_steps", "max_global_steps"), 0
    )
    bare = answer(
        server.generate.remote(
            request_id="r", prompt_ids=PROMPT, sampling_params={"max_new_tokens": 3}
        )
    )
    assert (len(bare.token_ids), bare.log_probs) == (3, None)


async def test_a_turn_is_bounded_as_by_verl_s_own_servers_where_prompts_grow() -> None:
    engine = FakeEngine(step_s=0.001, epoch=None, context=32)
    async with gateway_on(engine) as gateway:
        server = verl_server.VerlServer(
            gateway.url, "job", prompt_length=16, response_length=16, silence_s=5
        )
        for tokens, made in ((10, 16), (20, 12), (31, 1)):
            prompt = list(range(1, tokens + 1))
            for given in ({}, {"max_tokens": 16}, {"max_new_tokens": 16}):
                output = await server.generate(prompt, SAMPLING | given, f"r{tokens}")
                assert output.token_ids == continued(prompt, made, version=0), (tokens, given)
        await server.close()


async def test_a_turn_that_ends_early_for_a_fault_raises_and_is_not_rewarded() -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    jobs = [{"id": "job", "on_interrupt": "return_partial"}]
    async with gateway_on(engine, jobs=jobs, timeouts={"stuck_s": 1.0}) as gateway:
        server = verl_server.VerlServer(
            gateway.url, "job", prompt_length=16, response_length=400, fallback=False
        )
        turn = asyncio.create_task(server.generate(PROMPT, SAMPLING, "r"))
        await gateway.until_tokens(5)
        engine.unscored = 1 << 20
        with pytest.raises(Exhausted, match=r"ended after \d+ tokens: no engine made a token"):
            await asyncio.wait_for(turn, 10)
        await server.close()


def test_media_is_refused_in_words(server: Any) -> None:
    with pytest.raises(Exception, match="media is not routed"):
        answer(
            server.generate.remote(
                request_id="r", prompt_ids=PROMPT, sampling_params=SAMPLING, image_data=[b"x"]
            )
        )


def test_an_abort_returns_the_tokens_so_far_and_a_new_turn_waits_for_resume(server: Any) -> None:
    long = SAMPLING | {"max_tokens": 2000}
    running = server.generate.remote(request_id="a", prompt_ids=PROMPT, sampling_params=long)
    # Served one after the other: the long turn has begun when the short one has ended.
    answer(server.generate.remote(request_id="b", prompt_ids=PROMPT, sampling_params=SAMPLING))
    answer(server.abort_all_requests.remote())
    output = answer(running)
    assert output.stop_reason == "aborted"
    assert 0 < len(output.token_ids) < 2000
    assert output.token_ids == continued(PROMPT, len(output.token_ids), version=0)
    waiting = server.generate.remote(request_id="c", prompt_ids=PROMPT, sampling_params=SAMPLING)
    assert ray.wait([waiting], timeout=0.5)[0] == []
    answer(server.clear_kv_cache.remote())
    answer(server.resume_generation.remote())
    assert answer(waiting).stop_reason == "completed"


async def test_verl_s_own_client_and_balancer_serve_turns_from_it(server: Any) -> None:
    """Partial rollouts too: the client goes on from an aborted turn's tokens by itself."""
    llm_server = pytest.importorskip("verl.workers.rollout.llm_server")
    balancer = ray.remote(llm_server.GlobalRequestLoadBalancer).remote(servers={"gateway": server})
    rollout = SimpleNamespace(name="vllm", full_determinism=False, response_length=200)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    client = llm_server.LLMServerClient(config, balancer)
    output = await client.generate(
        "t", prompt_ids=PROMPT, sampling_params=dict(SAMPLING), priority=2, trajectory="t"
    )
    assert output.token_ids == continued(PROMPT, 12, version=0)
    assert output.extra_fields["max_global_steps"] == 0
    partial = llm_server.FullyAsyncLLMServerClient(config, balancer)
    given = SAMPLING | {"logprobs": True}
    turn = asyncio.create_task(partial.generate("u", prompt_ids=PROMPT, sampling_params=given))
    await client.generate("v", prompt_ids=PROMPT, sampling_params=dict(SAMPLING))
    await server.abort_all_requests.remote()
    await server.resume_generation.remote()
    output = await asyncio.wait_for(turn, ANSWER_S)
    assert output.token_ids == continued(PROMPT, 200, version=0)
    assert len(output.log_probs) == 200
