"""Child of test_weightsync_adapter.py: an engine with LoRA follows adapters; writes seen.json.

Each version is compared with the same adapter as PEFT saves it, loaded by vLLM from a directory
into the same engine under a name of its own; the base under it with a fresh engine without LoRA.
"""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.integration.weightsync_engine import (
    generated,
    new_engine,
    new_model,
    new_steps,
    refused,
    saved,
    update,
)

State = dict[str, torch.Tensor]

RANK = 4
MAX_RANK = 8
CONFIG = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
}
SHAPES = {
    "self_attn.q_proj": (128, 128),
    "self_attn.v_proj": (128, 64),
    "mlp.down_proj": (352, 128),
}
STORE = "job-a-lora"
NAME = "policy"
_STEPS = {1: (1, 2), 2: (3,)}
"""Versions of the adapter, by the version of `job-a` that they are for."""


def adapter_state(
    step: int, rank: int = RANK, shapes: Mapping[str, tuple[int, int]] = SHAPES
) -> State:
    """Adapter state in float32, as PEFT trains adapters; the engine computes in bfloat16."""
    generator = torch.Generator().manual_seed(7)
    state = {}
    for layer in range(2):
        for module, (inputs, outputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            down = torch.randn(rank, inputs, generator=generator)
            up = torch.randn(outputs, rank, generator=generator)
            state[f"{name}.lora_A.weight"] = down
            state[f"{name}.lora_B.weight"] = up * (1 + 0.25 * step)
    return state


def saved_adapter(state: State, config: Mapping[str, Any], directory: Path) -> str:
    """Saves an adapter like PEFT's `save_pretrained`; returns its directory."""
    directory.mkdir()
    save_file(state, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def _publish(stores: Path, bases: list[State]) -> dict[str, list[str]]:
    """Bases, versions 1 to 3 for them and, in stores of their own, an adapter that is too large and
    one for the first base alone."""
    from weightsync.layout.adapter import Adapter, Base
    from weightsync.publisher import Publisher

    with Publisher(stores / "job-a") as publisher:
        hashes = [publisher.publish(state).state_hash for state in bases]

    def on(base: int, config: dict[str, Any]) -> Adapter:
        return Adapter(Base(store="job-a", version=base, state_hash=hashes[base - 1]), config)

    done = []
    for base, steps in _STEPS.items():
        with Publisher(stores / STORE, adapter=on(base, CONFIG)) as publisher:
            done += [publisher.publish(adapter_state(step)).state_hash for step in steps]
    with Publisher(stores / "older", adapter=on(1, CONFIG)) as publisher:
        publisher.publish(adapter_state(1))
    large = {**CONFIG, "r": 2 * MAX_RANK}
    with Publisher(stores / "large", adapter=on(2, large)) as publisher:
        publisher.publish(adapter_state(1, 2 * MAX_RANK))
    return {"bases": hashes, "adapters": done}


def _followed(engine: Any, root: Path, published: list[str]) -> dict[str, Any]:
    """Samples of an engine with dummy weights as it follows adapters."""
    from vllm.lora.request import LoRARequest

    from weightsync.vllm.adapter_names import adapter_path

    policy = LoRARequest(NAME, 1, adapter_path(NAME))
    seen: dict[str, Any] = {}
    for version, state_hash in enumerate(published, start=1):
        known = {"store": STORE, "version": version, "state_hash": state_hash}
        seen[f"report_{version}"] = update(engine, **known, adapter=NAME)
        path = saved_adapter(adapter_state(version), CONFIG, root / f"peft-{version}")
        stock = LoRARequest(f"stock-{version}", 10 + version, path)
        seen[f"followed_{version}"] = generated(engine, policy)
        seen[f"stock_{version}"] = generated(engine, stock)
        seen[f"base_{version}"] = generated(engine)
    seen["refusals"] = {
        "base": refused(engine, store="job-a", version=3),
        "nameless": refused(engine, store=STORE, version=3),
        "large": refused(engine, store="large", version=1, adapter=NAME),
    }
    seen["staged"] = {
        "base": staged(engine, store="job-a", version=3),
        "older": staged(engine, store="older", version=1, adapter=NAME),
    }
    seen["after_refusals"] = generated(engine, policy)
    seen["resolved"] = asyncio.run(_resolved(engine))
    return seen


def staged(engine: Any, **asked: Any) -> dict[str, Any]:
    """The last reply: a version's index is read beside the engine's steps."""
    waiting = threading.Event()
    while (told := engine.collective_rpc("rosemux_stage", kwargs=asked)[0])["state"] == "running":
        waiting.wait(0.01)
    return dict(told)


async def _resolved(engine: Any) -> dict[str, str]:
    """A server front end's answers to model names that it does not know."""
    from vllm.lora.resolver import LoRAResolverRegistry

    from weightsync.vllm.adapter_names import register_resolver

    register_resolver()
    resolver = LoRAResolverRegistry.get_resolver("rosemux")
    told = {}
    for number, name in enumerate((NAME, "stranger"), start=40):
        request = await resolver.resolve_lora("base", name)
        request.lora_int_id = number
        try:
            engine.collective_rpc("add_lora", args=(request,))
            told[name] = "taken"
        except Exception as refusal:
            told[name] = str(refusal)
    return told


def main(root: Path) -> None:
    model = new_model()
    bases = new_steps(model)[:3]
    paths = [saved(model, state, root / f"base_{n}") for n, state in enumerate(bases[:2], start=1)]
    # An engine that is collected takes the process groups of the others along.
    fresh = [new_engine(path) for path in paths]
    following = new_engine(
        paths[0],
        load_format="dummy",
        weight_transfer_config={"backend": "rosemux"},
        enable_lora=True,
        max_loras=2,
        max_lora_rank=MAX_RANK,
    )
    seen: dict[str, Any] = {"fresh": [generated(engine) for engine in fresh]}
    seen["published"] = _publish(Path(os.environ["ROSEMUX_WEIGHT_ROOT"]), bases)
    seen |= _followed(following, root, seen["published"]["adapters"])
    (root / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
