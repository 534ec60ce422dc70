"""AReaL: its vLLM and its SGLang engine, remote ones, with the gateway as the one server address.

Rollouts are AReaL's own RLVR workflow over token ids. A turn that a new version cuts comes back
with its tokens so far, which AReaL's parser takes as such: it asks again with prompt and tokens.
"""

import asyncio
import importlib.metadata
from typing import Any

from areal.api import ModelRequest
from areal.api.cli_args import GenerationHyperparameters
from areal.engine.sglang_remote import RemoteSGLangEngine, SGLangBackend
from areal.engine.vllm_remote import RemotevLLMEngine, VLLMBackend
from areal.infra.utils.http import arequest_with_retry
from areal.workflow.rlvr import RLVRWorkflow
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.clients.client_facts import JOB, MODEL, STORE, URL, Facts
from weightsync import Publisher

ADDRESS = URL.removeprefix("http://")
MAX_TOKENS = 16
LONG_TOKENS = 800
GROUP = 2
QUESTIONS = ("What is a lease?", "Name an engine.", "Why is the gate closed?", "Count to four.")


def length_reward(
    _prompt: str, _text: str, _prompt_ids: list[int], ids: list[int], **_: Any
) -> float:
    return len(ids) / MAX_TOKENS


def roll_out(kind: type[RemotevLLMEngine | RemoteSGLangEngine], facts: Facts) -> None:
    engine = kind.from_pretrained(tokenizer_path=str(MODEL), max_concurrent_rollouts=16)
    engine.initialize(addr=ADDRESS)
    try:
        engine.set_version(7)
        batch = engine.rollout_batch(
            [{"messages": [{"role": "user", "content": each}]} for each in QUESTIONS],
            workflow=RLVRWorkflow,
            workflow_kwargs={
                "reward_fn": length_reward,
                "gconfig": GenerationHyperparameters(max_new_tokens=MAX_TOKENS),
                "tokenizer": AutoTokenizer.from_pretrained(MODEL),
            },
            group_size=GROUP,
        )
    finally:
        engine.destroy()
    rows = [_row(each, at) for each in batch for at in range(len(each["rewards"]))]
    assert len(rows) == GROUP * len(QUESTIONS), batch
    for ids, logprobs, reward in rows:
        assert abs(reward - len(ids) / MAX_TOKENS) < 1e-6
        facts.turn(ids, logprobs)


def _row(trajectories: dict[str, Any], at: int) -> tuple[list[int], list[float], float]:
    """Sampled ids, their log-probabilities and the reward, as the trainer gets them."""
    sampled = trajectories["loss_mask"][at].bool()
    assert set(trajectories["versions"][at][sampled].tolist()) == {7}
    return (
        trajectories["input_ids"][at][sampled].tolist(),
        trajectories["logprobs"][at][sampled].tolist(),
        float(trajectories["rewards"][at]),
    )


async def cut(backend: VLLMBackend | SGLangBackend, facts: Facts) -> int:
    """How many tokens of a turn that a new version cut AReaL's parser finds."""
    version = int(
        (await arequest_with_retry(ADDRESS, "/get_model_info", method="GET"))["weight_version"]
    )
    settings = GenerationHyperparameters(max_new_tokens=LONG_TOKENS, ignore_eos=True)
    request = backend.build_generation_request(
        ModelRequest(input_ids=[1, 20, 30, 40], gconfig=settings), with_lora=False, version=0
    )
    before = await _job()
    pinned = request.payload | {"weight_version": {"exact": version}}
    turn = asyncio.create_task(arequest_with_retry(ADDRESS, request.endpoint, pinned))
    while sum((await _job())["tokens"].values()) == sum(before["tokens"].values()):
        assert not turn.done(), turn
    with Publisher(STORE) as publisher:
        published = publisher.publish(load_file(MODEL / "model.safetensors"))
    body = {"version": published.version, "store": STORE.name, "cut_open_turns": True}
    await arequest_with_retry(ADDRESS, f"/v1/jobs/{JOB}/versions", body)
    told = backend.parse_generation_response(await turn)
    assert told.stop_reason == "abort", told
    assert 0 < len(told.output_tokens) < LONG_TOKENS, told
    facts.turn(told.output_tokens, told.output_logprobs, versions=[version])
    return len(told.output_tokens)


async def _job() -> dict[str, Any]:
    status = await arequest_with_retry(ADDRESS, "/v1/status", method="GET")
    assert isinstance(status, dict)
    job: dict[str, Any] = status["jobs"][JOB]
    return job


def main() -> None:
    facts = Facts()
    for kind in (RemotevLLMEngine, RemoteSGLangEngine):
        roll_out(kind, facts)
    cut_tokens = [asyncio.run(cut(backend(), facts)) for backend in (VLLMBackend, SGLangBackend)]
    facts.report(client=importlib.metadata.version("areal"), cut_tokens=cut_tokens)


if __name__ == "__main__":
    main()
