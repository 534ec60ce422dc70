"""Child of test_weightsync_vllm.py: fresh engines, then one that follows stores; writes seen.json.

The fresh engines come first: numba must not be loaded when a CPU worker of vLLM 0.32 starts.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

State = dict[str, torch.Tensor]
PROMPTS = [{"prompt_token_ids": [1, 2, 3, 4, 5, last]} for last in range(4)]


def new_model(*, tied: bool = False) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def new_steps(model: Qwen2ForCausalLM) -> list[State]:
    """Five states of one job; every step moves a twentieth of the weights."""
    run = [{name: tensor.clone() for name, tensor in model.state_dict().items()}]
    for _ in range(4):
        run.append({name: moved(tensor) for name, tensor in run[-1].items()})
    return run


def moved(tensor: torch.Tensor) -> torch.Tensor:
    hit = torch.rand(tensor.shape) < 0.05
    return torch.where(hit, tensor.float() * 1.05, tensor.float()).to(tensor.dtype)


def saved(model: Qwen2ForCausalLM, state: State, path: Path) -> str:
    model.load_state_dict(state)
    model.save_pretrained(path)
    return str(path)


def new_engine(path: str, **more: Any) -> Any:
    from vllm import LLM

    usual = {"enforce_eager": True, "dtype": "bfloat16", "max_model_len": 128, "seed": 0}
    return LLM(model=path, skip_tokenizer_init=True, **(usual | more))


def generated(engine: Any, adapter: Any = None) -> dict[str, Any]:
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    sampling = SamplingParams(
        temperature=0, max_tokens=12, logprobs=1, ignore_eos=True, detokenize=False
    )
    done = engine.generate(PROMPTS, sampling, use_tqdm=False, lora_request=adapter)
    outputs = [out.outputs[0] for out in done]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [next(iter(step.values())).logprob for step in output.logprobs] for output in outputs
        ],
    }


def _tokens_per_s(engine: Any) -> float:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [7, 8, last]} for last in range(16)]
    best = 0.0
    for _ in range(3):
        engine.reset_prefix_cache()
        started = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        best = max(best, 16 * 48 / (time.perf_counter() - started))
    return best


def update(engine: Any, **update_info: Any) -> dict[str, Any]:
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", kwargs={"update_info": update_info})
    engine.collective_rpc("finish_weight_update")
    report: dict[str, Any] = engine.collective_rpc("rosemux_weights")[0]
    return report


def refused(engine: Any, **update_info: Any) -> dict[str, Any]:
    try:
        update(engine, **update_info)
        error = "none"
    except Exception as refusal:
        error = str(refusal)
    return {
        "error": error,
        "state_hash": engine.collective_rpc("rosemux_weights")[0].get("state_hash"),
    }


def _refusals(engine: Any, stores: Path) -> dict[str, Any]:
    """Everything that must leave version 4 in force."""
    shard = stores / "job-b" / "weight_v000001" / "model-00001-of-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refusals = {
        "unpublished": refused(engine, store="job-a", version=9),
        "older": refused(engine, store="job-a", version=2),
        "path": refused(engine, store="../job-a", version=4),
        "unknown_store": refused(engine, store="job-c", version=1),
        "other_hash": refused(engine, store="job-a", version=5, state_hash="0" * 32),
        "broken_payload": refused(engine, store="job-b", version=1),
        "unknown_field": refused(engine, store="job-a", version=4, root="/"),
    }
    shard.write_bytes(whole)
    return refusals


def _staged(engine: Any, version: int) -> dict[str, Any]:
    """Staging's first reply and its last."""
    first = engine.collective_rpc("rosemux_stage", args=("job-a", version))[0]
    waiting = threading.Event()
    while (told := engine.collective_rpc("rosemux_stage", args=("job-a", version))[0])[
        "state"
    ] == "running":
        waiting.wait(0.01)
    return {"first": first, "last": told}


def _staging(engine: Any, state_hash: str) -> dict[str, Any]:
    """Version 1 to 2 while the engine samples, and a version that does not exist."""
    before = generated(engine)
    engine.collective_rpc("rosemux_stage", args=("job-a", 2))
    during = generated(engine)
    told = _staged(engine, 2)
    ready = generated(engine)
    return {
        "told": told,
        "unchanged": before == during == ready,
        "report": update(engine, store="job-a", version=2, state_hash=state_hash),
        "unpublished": _staged(engine, 9),
    }


def _damaged(engine: Any, version: int) -> dict[str, Any]:
    """An update on top of weights that another writer has changed."""

    def touch(model: torch.nn.Module) -> None:
        next(iter(model.parameters())).data.view(torch.int16)[0, 0] ^= 1

    engine.apply_model(touch)
    return update(engine, store="job-a", version=version)


def _torn_update(engine: Any, state_hash: str) -> dict[str, Any]:
    """Version 5 with a failure in the middle of the first attempt."""
    from weightsync.vllm.loader_map import LoaderMap

    finish = LoaderMap.finish
    torn = False

    def failing(self: LoaderMap, changed: Any) -> None:
        nonlocal torn
        if not torn:
            torn = True
            next(iter(self._flat.values()))[0] ^= 1
            raise RuntimeError("torn")
        finish(self, changed)

    LoaderMap.finish = failing  # type: ignore[method-assign]
    try:
        return update(engine, store="job-a", version=5, state_hash=state_hash)
    finally:
        LoaderMap.finish = finish  # type: ignore[method-assign]


def main(root: Path) -> None:
    seen: dict[str, Any] = {}
    stores = Path(os.environ["ROSEMUX_WEIGHT_ROOT"])
    model = new_model()
    steps = new_steps(model)
    other = {name: tensor.roll(1, 0) for name, tensor in steps[0].items()}
    # An engine that is collected takes the process groups of the others along.
    alive = []
    for name, state in (("version_1", steps[0]), ("version_4", steps[3]), ("other", other)):
        fresh = new_engine(saved(model, state, root / name))
        seen[f"fresh_{name}"] = generated(fresh)
        seen["tokens_per_s"] = {"fresh": _tokens_per_s(fresh)}
        alive.append(fresh)
    synced = new_engine(
        str(root / "version_1"), load_format="dummy", weight_transfer_config={"backend": "rosemux"}
    )

    from weightsync.publisher import Publisher

    with Publisher(stores / "job-a") as publisher:
        published = [publisher.publish(state) for state in (*steps, steps[3])]
    with Publisher(stores / "job-b") as publisher:
        publisher.publish(other)
    seen["published"] = [step.state_hash for step in published]
    seen["dummy"] = generated(synced)
    for version in (1, 2, 4):
        expected = published[version - 1].state_hash
        if version == 2:
            seen["staging"] = _staging(synced, expected)
            continue
        seen[f"report_{version}"] = update(
            synced, store="job-a", version=version, state_hash=expected
        )
        seen[f"version_{version}"] = generated(synced)
    seen["tokens_per_s"]["synced"] = _tokens_per_s(synced)
    seen["refusals"] = _refusals(synced, stores)
    seen["report_other"] = update(synced, store="job-b", version=1)
    seen["other"] = generated(synced)
    update(synced, store="job-a", version=4)
    seen["back"] = generated(synced)
    seen["report_torn"] = _torn_update(synced, published[4].state_hash)
    seen["report_damaged"] = _damaged(synced, 6)
    seen["damaged"] = generated(synced)
    (root / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
