"""Child of test_weightsync_derived.py: a model of experts, quantised at load or not, or one with
latent attention.

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
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from tests.integration.weightsync_engine import State, generated, moved, new_engine, update

SHARD = "model.safetensors"


def _mixture() -> MixtralForCausalLM:
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
    return MixtralForCausalLM(config).to(torch.bfloat16)


def _latent() -> DeepseekV3ForCausalLM:
    """A dense layer and one of experts. vLLM's CPU kernel knows latents of 512 and 64 only."""
    config = DeepseekV3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_nextn_predict_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            # float32 in published checkpoints too.
            buffer.data = torch.randn(buffer.shape)
    return model


def checkpoints(root: Path, *, latent: bool = False) -> tuple[State, State]:
    """Two consecutive states in `first` and `second`, with the names that trainers save."""
    torch.manual_seed(0)
    model = _latent() if latent else _mixture()
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


def main(root: Path, kind: str) -> None:
    is_latent = kind in {"latent", "further"}
    states = checkpoints(root, latent=is_latent)
    # The kernel for AMX keeps packed copies only.
    loaded = {"attention_backend": "CPU_MLA"} if is_latent else {"quantization": kind}
    loaded = {} if kind == "none" else loaded
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
        # A layer that predicts further tokens, which an engine without drafts leaves out.
        more = {f"model.layers.2.{name}.weight": torch.ones(128) for name in ("enorm", "hnorm")}
        more["model.layers.2.eh_proj.weight"] = torch.randn(128, 256).bfloat16()
        more = more if kind == "further" else {}
        hashes = [publisher.publish(state | more).state_hash for state in (*states, states[0])]
    seen |= _followed(following)
    (root / "seen.json").write_text(json.dumps(seen | {"kind": kind, "published": hashes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
