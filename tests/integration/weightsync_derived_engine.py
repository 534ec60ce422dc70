"""Child of test_weightsync_derived.py: a model of experts, quantised at load or not.

Two fresh engines, then one that follows a store; writes seen.json. The fresh engines come first:
numba must not be loaded when a CPU worker of vLLM 0.32 starts.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from tests.integration.weightsync_engine import State, generated, moved, new_engine, update

SHARD = "model.safetensors"


def checkpoints(root: Path) -> tuple[State, State]:
    """Two consecutive states in `first` and `second`, with the names that trainers save."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = MixtralForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for name in ("first", "second"):
        model.save_pretrained(root / name)
    first = load_file(root / "first" / SHARD)
    second = {name: moved(tensor) for name, tensor in first.items()}
    save_file(second, root / "second" / SHARD, metadata={"format": "pt"})
    return first, second


def _followed(engine: Any) -> dict[str, Any]:
    """Samples of a following engine at versions 1 to 3: first, second, first."""
    seen: dict[str, Any] = {"dummy": generated(engine)}
    for version in (1, 2, 3):
        seen[f"report_{version}"] = update(engine, store="experts", version=version)
        seen[f"version_{version}"] = generated(engine)
    return seen


def main(root: Path, quantization: str) -> None:
    states = checkpoints(root)
    loaded = {"quantization": None if quantization == "none" else quantization}
    # An engine that is collected takes the process groups of the others along.
    fresh = {name: new_engine(str(root / name), **loaded) for name in ("first", "second")}
    seen = {name: generated(engine) for name, engine in fresh.items()}
    following = new_engine(
        str(root / "first"),
        load_format="dummy",
        weight_transfer_config={"backend": "rosemux"},
        **loaded,
    )

    from weightsync.publisher import Publisher

    with Publisher(Path(os.environ["ROSEMUX_WEIGHT_ROOT"]) / "experts") as publisher:
        hashes = [publisher.publish(state).state_hash for state in (*states, states[0])]
    seen |= _followed(following)
    (root / "seen.json").write_text(json.dumps(seen | {"published": hashes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
