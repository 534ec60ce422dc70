"""SkyRL: its inference client, with the gateway as its router and as its one inference server.

Its data plane is `proxy_url`; what it tells every server goes to the routes of the job, where the
gateway stands for all engines. SkyRL makes the sampling parameters from its own settings.
"""

import asyncio
import importlib.metadata
import importlib.util
import sys
import types
from typing import Any


def _without_package_code(name: str) -> None:
    """Lets submodules of a package be imported where its own `__init__` needs Python 3.12."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    assert spec is not None
    assert spec.submodule_search_locations
    package = types.ModuleType(name)
    folder = "/".join(name.split(".")[1:])
    package.__path__ = [f"{place}/{folder}" for place in spec.submodule_search_locations]
    sys.modules[name] = package


if sys.version_info < (3, 12):
    _without_package_code("skyrl.backends")

from skyrl.backends.skyrl_train.inference_servers.engine_utils import (  # noqa: E402
    get_sampling_params_for_backend,
)
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.train.config import SamplingParams  # noqa: E402

from tests.clients.client_facts import JOB, URL, Facts  # noqa: E402

MAX_TOKENS = 16
QUESTIONS = ("What is a lease?", "Name an engine.", "Why is the gate closed?", "Count to four.")


def sampling(**given: Any) -> dict[str, Any]:
    params = SamplingParams(max_generate_length=MAX_TOKENS, **given)
    told: dict[str, Any] = get_sampling_params_for_backend("vllm", params)
    return told


async def roll_out(client: RemoteInferenceClient, facts: Facts) -> None:
    """Two turns of each trajectory: the second prompt continues the first turn's tokens."""
    sessions = [f"trajectory-{index}" for index in range(2 * len(QUESTIONS))]
    prompts = await client.tokenize([*QUESTIONS, *QUESTIONS])
    for _ in range(2):
        told = await client.generate(
            {
                "prompt_token_ids": prompts,
                "sampling_params": sampling(),
                "session_ids": sessions,
                "cache_salt": str(client.weight_version),
            }
        )
        assert set(told["stop_reasons"]) <= {"stop", "length"}, told["stop_reasons"]
        for ids, logprobs in zip(told["response_ids"], told["response_logprobs"], strict=True):
            facts.turn(ids, logprobs)
        assert told["responses"] == await client.detokenize(told["response_ids"])
        prompts = [prompt + ids for prompt, ids in zip(prompts, told["response_ids"], strict=True)]
    for session in sessions:
        await client.finish_session(session)


async def sample(client: RemoteInferenceClient, facts: Facts) -> None:
    """The samples of one prompt, as SkyRL's Tinker server asks for them."""
    (prompt,) = await client.tokenize([QUESTIONS[0]])
    told = await client.sample(
        {
            "json": {
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
                "num_samples": 3,
                "sampling_params": {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 5},
                "session_id": "sampled",
            }
        }
    )
    assert len({tuple(each["tokens"]) for each in told["sequences"]}) == 3, told
    for each in told["sequences"]:
        assert each["stop_reason"] in ("stop", "length")
        facts.turn(each["tokens"], each["logprobs"])


async def talk(client: RemoteInferenceClient, facts: Facts) -> None:
    """Chat, its prompt alone, and text: the same greedy tokens from each."""
    chat = {
        "messages": [{"role": "user", "content": QUESTIONS[0]}],
        "temperature": 0.0,
        "max_tokens": MAX_TOKENS,
        "session_id": "talked",
    }
    rendered = await client.render_chat_completion({"json": dict(chat)})
    asked = {**chat, "logprobs": True, "return_token_ids": True}
    said = (await client.chat_completion({"json": asked}))["choices"][0]
    prompt = rendered["token_ids"]
    told = await client.completion(
        {"json": {"prompt": prompt, "temperature": 0.0, "max_tokens": MAX_TOKENS, "logprobs": 0}}
    )
    written = told["choices"][0]
    assert written["text"] == said["message"]["content"], (written, said)
    facts.turn(said["token_ids"], [each["logprob"] for each in said["logprobs"]["content"]])
    facts.turn(said["token_ids"], written["logprobs"]["token_logprobs"])


async def main() -> None:
    facts = Facts()
    async with RemoteInferenceClient(
        proxy_url=URL,
        server_urls=[f"{URL}/v1/jobs/{JOB}/vllm"],
        data_parallel_size=1,
        model_name=JOB,
    ) as client:
        assert await client.get_world_size() == (1, 1)
        await roll_out(client, facts)
        await client.pause_generation()
        await client.resume_generation()
        await sample(client, facts)
        await talk(client, facts)
    facts.report(client=importlib.metadata.version("skyrl"))


if __name__ == "__main__":
    asyncio.run(main())
