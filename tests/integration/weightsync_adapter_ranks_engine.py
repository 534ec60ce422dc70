"""Child of test_weightsync_adapter_ranks.py: an engine of two ranks that share tensors, with LoRA.

Each version is compared with the same adapter as PEFT saves it, loaded by vLLM from a directory
into the same engine under a name of its own; writes seen.json.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.integration.weightsync_adapter_engine import (
    NAME,
    RANK,
    State,
    adapter_state,
    saved_adapter,
)
from tests.integration.weightsync_derived_engine import checkpoints
from tests.integration.weightsync_engine import (
    generated,
    new_engine,
    new_model,
    new_steps,
    refused,
    saved,
    update,
)

ON_BASE = {1: 1, 2: 1, 3: 2}
"""Versions of the adapter, and the version of the model that each is for."""


SHAPES = {
    "self_attn.q_proj": (128, 128),
    "self_attn.v_proj": (128, 64),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (128, 352),
    "mlp.up_proj": (128, 352),
    "mlp.down_proj": (352, 128),
}
"""Cut by rows, by columns, and two halves in one."""
STRAY = {**SHAPES, "cross.q_proj": (4, 4)}
"""Shapes with a layer that the model does not have, of a kind that it has."""
FOLLOWING = {
    "load_format": "dummy",
    "weight_transfer_config": {"backend": "rosemux"},
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
}


def _config(shapes: Mapping[str, object]) -> dict[str, Any]:
    modules = sorted({name.rsplit(".")[-1] for name in shapes})
    return {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": modules}


def _publish(stores: Path, bases: list[State]) -> list[str]:
    """The model's versions, those of an adapter, and an adapter that fits in part; the hashes."""
    from weightsync.layout.adapter import Adapter, Base
    from weightsync.publisher import Publisher

    with Publisher(stores / "job-a") as publisher:
        hashes = [publisher.publish(state).state_hash for state in bases]

    def on(base: int, shapes: Mapping[str, object]) -> Adapter:
        held = Base(store="job-a", version=base, state_hash=hashes[base - 1])
        return Adapter(held, _config(shapes))

    for base in (1, 2):
        with Publisher(stores / "lora", adapter=on(base, SHAPES)) as publisher:
            for version in (version for version, its in ON_BASE.items() if its == base):
                publisher.publish(adapter_state(version, shapes=SHAPES))
    with Publisher(stores / "stray", adapter=on(2, STRAY)) as publisher:
        publisher.publish(adapter_state(1, shapes=STRAY))
    return hashes


def _followed(engine: Any, root: Path) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    from weightsync.vllm.adapter_names import adapter_path

    policy = LoRARequest(NAME, 1, adapter_path(NAME))
    seen: dict[str, Any] = {}
    for version in ON_BASE:
        update(engine, store="lora", version=version, adapter=NAME)
        state = adapter_state(version, shapes=SHAPES)
        path = saved_adapter(state, _config(SHAPES), root / f"peft-{version}")
        stock = LoRARequest(f"stock-{version}", 10 + version, path)
        seen[f"reports_{version}"] = list(engine.collective_rpc("rosemux_weights"))
        seen[f"followed_{version}"] = generated(engine, policy)
        seen[f"stock_{version}"] = generated(engine, stock)
        seen[f"base_{version}"] = generated(engine)
    seen["stray"] = refused(engine, store="stray", version=1, adapter=NAME)
    seen["after_stray"] = generated(engine, policy)
    return seen


def _experts_refused(root: Path) -> str:
    """The refusal of adapters by an engine of experts, even of those that leave the experts
    alone."""
    checkpoints(root)
    try:
        new_engine(str(root / "first"), lora_target_modules=["q_proj"], **FOLLOWING)
    except Exception as refusal:
        return str(refusal)
    return "none"


def main(root: Path) -> None:
    seen: dict[str, Any] = {"experts": _experts_refused(root)}
    model = new_model()
    bases = new_steps(model)[:2]
    engine = new_engine(
        saved(model, bases[0], root / "base"),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        **FOLLOWING,
    )
    seen["bases"] = _publish(Path(os.environ["ROSEMUX_WEIGHT_ROOT"]), bases)
    seen |= _followed(engine, root)
    (root / "seen.json").write_text(json.dumps(seen))
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
