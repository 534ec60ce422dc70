"""Child of test_weightsync_parallel.py: two engines of two ranks each, in turn; writes seen.json.

The first loads a checkpoint, the second follows a store to the same state.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.integration.weightsync_derived_engine import checkpoints
from tests.integration.weightsync_engine import (
    State,
    generated,
    moved,
    new_engine,
    new_model,
    refused,
    saved,
    update,
)

TWO_PROCESSES = {"distributed_executor_backend": "mp"}
TENSOR = {"tensor_parallel_size": 2, **TWO_PROCESSES}
EXPERTS = {
    "enable_expert_parallel": True,
    "worker_cls": "tests.integration.weightsync_expert_worker.ExpertMapWorker",
    **TENSOR,
}
PIPELINE = {
    "pipeline_parallel_size": 2,
    # The second rank's buffer for what the first one sends is made in a warm-up, which an eager
    # engine on a CPU leaves out. This mode compiles nothing there, but warms up.
    "enforce_eager": False,
    "compilation_config": {"mode": 1},
    **TWO_PROCESSES,
}
ON_RAY = {**TENSOR, "distributed_executor_backend": "ray"}
SPLITS = {
    "tensors": TENSOR,
    "experts": EXPERTS,
    "layers": PIPELINE,
    "ray": ON_RAY,
    "legacy-ray": ON_RAY,
}


def _dense_checkpoints(root: Path) -> tuple[State, State]:
    """Two checkpoints of a model with a tied head: a pipeline's last rank has the first's
    embedding."""
    model = new_model(tied=True)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    second = {name: moved(tensor) for name, tensor in first.items()}
    for state in (first, second):
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    saved(model, first, root / "first")
    saved(model, second, root / "second")
    return first, second


def _touch(worker: Any) -> None:
    """Changes one weight of one rank without a publish."""
    import torch

    if worker.rank == 1:
        next(iter(worker.model_runner.model.parameters())).data.view(torch.int16).flatten()[0] ^= 1


def _fail_once(worker: Any) -> None:
    """One rank cannot load the next version, the other one can."""
    if worker.rank == 1:
        weights = worker.weight_transfer_engine._weights
        load = weights.load

        def failing(_update_info: Any) -> None:
            weights.load = load
            raise RuntimeError("this rank has no store")

        weights.load = failing


def _go_on(engine: Any, **update_info: Any) -> None:
    """Retries like the gateway; a rank that took the version is still in an update."""
    with suppress(RuntimeError):
        engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", kwargs={"update_info": update_info})
    engine.collective_rpc("finish_weight_update")


def _reports(engine: Any) -> list[dict[str, Any]]:
    """One report per rank."""
    return list(engine.collective_rpc("rosemux_weights"))


def _forge(stores: Path, states: tuple[State, ...], version: int) -> None:
    """One element of a delta differs, and no digest shows it: columns of tensors' ranks, all of a
    layer of the others'."""
    from harvester.contracts.ids import WeightVersion
    from tests.unit.weightsync.vllm.forged_delta import forge_delta
    from weightsync.elements.bits import bits_of

    name = "model.layers.0.self_attn.o_proj.weight"
    old, new = (bits_of(states[number % 2][name]) for number in (version, version + 1))
    wrong = new.copy()
    wrong[-1] ^= 1
    forge_delta(stores / "job", WeightVersion(version), name, old, wrong)


def _followed(
    engine: Any, stores: Path, states: tuple[State, ...], published: list[str]
) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for version in (1, 2):
        update(engine, store="job", version=version, state_hash=published[version - 1])
        seen[f"reports_{version}"] = _reports(engine)
        seen[f"version_{version}"] = generated(engine)
    shard = next((stores / "job" / "weight_v000004").glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    seen["refusals"] = [
        refused(engine, store="job", version=4, state_hash=published[3]),
        refused(engine, store="job", version=4, state_hash="0" * 32),
        refused(engine, store="job", version=9),
    ]
    shard.write_bytes(whole)
    seen["after_refusals"] = generated(engine)
    engine.collective_rpc(_touch)
    engine.collective_rpc(_fail_once)
    seen["half"] = refused(engine, store="job", version=4)
    _go_on(engine, store="job", version=4, state_hash=published[3])
    seen["reports_4"] = _reports(engine)
    seen["version_4"] = generated(engine)
    for version in (5, 6):
        _forge(stores, states, version)
    # A skip delta leads past the fifth version's own delta, and nothing past the sixth's.
    update(engine, store="job", version=5, state_hash=published[4])
    seen["reports_5"] = _reports(engine)
    seen["version_5"] = generated(engine)
    seen["forged"] = refused(engine, store="job", version=6, state_hash=published[5])
    seen["reports_forged"] = _reports(engine)
    seen["after_forged"] = generated(engine)
    return seen


def main(root: Path, split: str) -> None:
    if SPLITS[split] is not ON_RAY:
        _run(root, split, fresh_split=split)
        return
    from tests.integration.ray_cpu_workers import LEGACY, cluster, unlink_shared_memory

    os.environ.update(LEGACY if split == "legacy-ray" else {})
    with cluster(workers=2):
        _run(root, split, fresh_split="tensors", started=unlink_shared_memory)


def _run(
    root: Path, split: str, *, fresh_split: str, started: Callable[[Any], None] = lambda _: None
) -> None:
    states = (checkpoints if split in {"tensors", "experts"} else _dense_checkpoints)(root)
    fresh = new_engine(str(root / "second"), **SPLITS[fresh_split])
    seen: dict[str, Any] = {"fresh": generated(fresh)}
    fresh.llm_engine.engine_core.shutdown()
    following = new_engine(
        str(root / "first"),
        load_format="dummy",
        weight_transfer_config={"backend": "rosemux"},
        **SPLITS[split],
    )
    started(following)

    from weightsync.publisher import Publisher

    stores = Path(os.environ["ROSEMUX_WEIGHT_ROOT"])
    with Publisher(stores / "job") as publisher:
        chain = (*states, *states, *states)
        seen["published"] = [publisher.publish(state).state_hash for state in chain]
    seen |= _followed(following, stores, states, seen["published"])
    (root / "seen.json").write_text(json.dumps(seen))
    following.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
