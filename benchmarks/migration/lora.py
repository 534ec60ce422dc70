"""A LoRA adapter for the benchmark's model, strong enough that it changes what greedy turns say."""

from pathlib import Path
from random import Random

from benchmarks.migration.model import publish_model
from harvester.contracts.ids import WeightVersion
from weightsync.layout.adapter import Adapter, Base
from weightsync.publisher import Publisher

NAME = "policy"
RANK = 8
ENGINE_ARGUMENTS = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "1")
_CONFIG = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": RANK,
    "target_modules": ["q_proj", "v_proj"],
}
_SHAPES = {"q_proj": (128, 128), "v_proj": (128, 64)}
_LAYERS = 4


def publish_adapter(model: Path, stores: Path, *, seed: int) -> None:
    """The model as version 1 of the store `base`, an adapter on it as version 1 of `lora`."""
    import torch

    state_hash = publish_model(model, stores / "base")
    base = Base(store="base", version=WeightVersion(1), state_hash=state_hash)
    generator = torch.Generator().manual_seed(Random(seed).getrandbits(32))
    state = {}
    for layer in range(_LAYERS):
        for module, (inputs, outputs) in _SHAPES.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            down = torch.randn(RANK, inputs, generator=generator)
            state[f"{name}.lora_A.weight"] = 0.3 * down
            state[f"{name}.lora_B.weight"] = 0.3 * torch.randn(outputs, RANK, generator=generator)
    with Publisher(stores / "lora", adapter=Adapter(base, _CONFIG)) as publisher:
        publisher.publish(state)
