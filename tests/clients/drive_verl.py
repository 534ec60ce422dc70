"""verl: its generation entry point, which asks OpenAI's routes, and its agent loops' clients.

The loops ask a Ray actor through verl's load balancer: ours is one server; the gateway has a fleet.
"""

import asyncio
import importlib.metadata

import numpy as np
import ray
from omegaconf import OmegaConf
from verl.trainer import main_generation_server
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import get_router_handle

from scheduler.client import verl_server
from tests.clients.client_facts import JOB, URL, Facts

ADDRESS = URL.removeprefix("http://")
MAX_TOKENS = 16
LONG_TOKENS = 600
SAMPLES = 3
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
QUESTIONS = ("What is a lease?", "Name an engine.", "Why is the gate closed?", "Count to four.")


async def generate(facts: Facts) -> None:
    """Calls `main_generation_server` on the gateway's address; ids and log-probabilities are
    asked for beside its own parameters."""
    chats = np.array([[{"role": "user", "content": each}] for each in QUESTIONS])
    told = await main_generation_server.generate(
        [ADDRESS],
        JOB,
        SAMPLES,
        {
            "temperature": 1.0,
            "top_p": 1.0,
            "max_tokens": MAX_TOKENS,
            "logprobs": True,
            "return_token_ids": True,
        },
        chats,
    )
    (replies,) = told
    assert len(replies) == SAMPLES * len(QUESTIONS)
    for reply in replies:
        (choice,) = reply.choices
        assert choice.message.content is not None
        facts.turn(
            choice.token_ids,
            [each.logprob for each in choice.logprobs.content],
            versions=[each["version"] for each in choice.weight_versions],
        )


async def act(facts: Facts) -> None:
    """Batches of turns as agent loops ask for them, and a partial rollout: verl's client goes on by
    itself from what an aborted turn returned."""
    server = verl_server.started(URL, JOB, prompt_length=LONG_TOKENS, response_length=MAX_TOKENS)
    balancer = get_router_handle({"gateway": server})
    rollout = {"name": "vllm", "response_length": LONG_TOKENS}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    for kind in (LLMServerClient, FullyAsyncLLMServerClient):
        client = kind(config, balancer)
        turns = [
            client.generate(
                f"{kind.__name__}-{index}",
                prompt_ids=[1, 20 + index, 30],
                sampling_params=SAMPLING | {"max_tokens": MAX_TOKENS},
            )
            for index in range(len(QUESTIONS))
        ]
        for output in await asyncio.gather(*turns):
            assert output.stop_reason in ("completed", "length"), output
            check_output(output, facts)
    long = asyncio.create_task(
        client.generate("long", prompt_ids=[1, 50], sampling_params=SAMPLING | {"ignore_eos": True})
    )
    # Served one after the other: the long turn has begun when the short one has ended.
    short = SAMPLING | {"max_tokens": MAX_TOKENS}
    check_output(await client.generate("short", prompt_ids=[1, 60], sampling_params=short), facts)
    assert not long.done()
    await server.abort_all_requests.remote()
    await server.resume_generation.remote()
    output = await long
    assert len(output.token_ids) == LONG_TOKENS
    check_output(output, facts)


def check_output(output: TokenOutput, facts: Facts) -> None:
    steps = [output.extra_fields[f"{which}_global_steps"] for which in ("min", "max")]
    facts.turn(output.token_ids, output.log_probs, versions=steps)


def main() -> None:
    facts = Facts()
    asyncio.run(generate(facts))
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    asyncio.run(act(facts))
    ray.shutdown()
    # The aborted turn and the one that goes on from it are two turns of the gateway.
    facts.report(client=importlib.metadata.version("verl"), whole=False)


if __name__ == "__main__":
    main()
