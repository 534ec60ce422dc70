"""Child of test_weightsync_adapter_ranks.py: an engine of two ranks that share tensors, with LoRA.

Each version is compared with the same adapter as PEFT saves it, loaded by vLLM from a directory
into the same engine under a name of its own; writes seen.json.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Job:
    bases: tuple[State, ...]
    path: str
    shapes: Mapping[str, tuple[int, int]]
    stray: Mapping[str, tuple[int, int]]
    """Modules that the engine has no LoRA for."""
    settings: Mapping[str, Any]


def _dense(root: Path) -> _Job:
    """Cut by rows, by columns, and two halves in one; an adapter of another model."""
    model = new_model()
    bases = tuple(new_steps(model)[:2])
    shapes = {
        "self_attn.q_proj": (128, 128),
        "self_attn.v_proj": (128, 64),
        "self_attn.o_proj": (128, 128),
        "mlp.gate_proj": (128, 352),
        "mlp.up_proj": (128, 352),
        "mlp.down_proj": (352, 128),
    }
    return _Job(bases, saved(model, bases[0], root / "base"), shapes, {"cross.q_proj": (4, 4)}, {})


def _experts(root: Path) -> _Job:
    """Attention only: vLLM's CPU build has no LoRA for experts."""
    bases = checkpoints(root)
    shapes = {"self_attn.q_proj": (256, 256), "self_attn.o_proj": (256, 256)}
    stray = {"block_sparse_moe.experts.0.w1": (256, 256)}
    trained = {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    return _Job(bases, str(root / "first"), shapes, stray, trained)


def _config(shapes: Mapping[str, object]) -> dict[str, Any]:
    modules = sorted({name.rsplit(".")[-1] for name in shapes})
    return {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": modules}


def _publish(stores: Path, job: _Job) -> list[str]:
    """The model's versions, those of an adapter, and an adapter that fits in part; the hashes."""
    from weightsync.adapter import Adapter, Base
    from weightsync.publisher import Publisher

    with Publisher(stores / "job-a") as publisher:
        hashes = [publisher.publish(state).state_hash for state in job.bases]

    def on(base: int, shapes: Mapping[str, object]) -> Adapter:
        held = Base(store="job-a", version=base, state_hash=hashes[base - 1])
        return Adapter(held, _config(shapes))

    for base in (1, 2):
        with Publisher(stores / "lora", adapter=on(base, job.shapes)) as publisher:
            for version in (version for version, its in ON_BASE.items() if its == base):
                publisher.publish(adapter_state(version, shapes=job.shapes))
    shapes = {**job.shapes, **job.stray}
    with Publisher(stores / "stray", adapter=on(2, shapes)) as publisher:
        publisher.publish(adapter_state(1, shapes=shapes))
    return hashes


def _followed(engine: Any, root: Path, job: _Job) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    from weightsync.vllm.adapter_names import adapter_path

    policy = LoRARequest(NAME, 1, adapter_path(NAME))
    seen: dict[str, Any] = {}
    for version in ON_BASE:
        update(engine, store="lora", version=version, adapter=NAME)
        state = adapter_state(version, shapes=job.shapes)
        path = saved_adapter(state, _config(job.shapes), root / f"peft-{version}")
        stock = LoRARequest(f"stock-{version}", 10 + version, path)
        seen[f"reports_{version}"] = list(engine.collective_rpc("rosemux_weights"))
        seen[f"followed_{version}"] = generated(engine, policy)
        seen[f"stock_{version}"] = generated(engine, stock)
        seen[f"base_{version}"] = generated(engine)
    seen["stray"] = refused(engine, store="stray", version=1, adapter=NAME)
    seen["after_stray"] = generated(engine, policy)
    return seen


def main(root: Path, model: str) -> None:
    job = {"dense": _dense, "experts": _experts}[model](root)
    engine = new_engine(
        job.path,
        load_format="dummy",
        weight_transfer_config={"backend": "rosemux"},
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        **job.settings,
    )
    seen: dict[str, Any] = {"bases": _publish(Path(os.environ["ROSEMUX_WEIGHT_ROOT"]), job)}
    seen |= _followed(engine, root, job)
    (root / "seen.json").write_text(json.dumps(seen))
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
