"""Child of test_weightsync_ranks.py: vLLM's own models as each rank has them, without an engine.

One process plays the ranks in turn: the groups that vLLM asks for its place are replaced, and the
models are built, loaded and processed by vLLM's own functions. For each rank there is a model that
follows a store and one that loaded the same state itself; writes seen.json.
"""

import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.integration.weightsync_derived_engine import checkpoints
from tests.integration.weightsync_engine import State, moved, new_model, saved

RANKS = 2


def _config(path: str, **parallel: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(
        model=path,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        weight_transfer_config={"backend": "rosemux"},
        **parallel,
    )
    return made.create_engine_config()


@contextmanager
def _as_rank(config: Any, rank: int, groups: tuple[str, ...]) -> Iterator[None]:
    """Inside, vLLM takes this process for the given rank of those groups."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    fake = {}
    for name in groups:
        group = copy.copy(getattr(parallel_state, name))
        group.rank, group.rank_in_group = rank, rank
        group.ranks, group.world_size = list(range(RANKS)), RANKS
        group.device_group = SimpleNamespace(size=lambda: RANKS)
        fake[name] = group
    with mock.patch.multiple(parallel_state, **fake), set_current_vllm_config(config):
        yield


def _built(config: Any, state: State) -> Any:
    """A rank's model that loaded a state, as vLLM's own loader of checkpoints leaves it."""
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )

    # One model of a name is all that an engine has.
    config.compilation_config.static_forward_context.clear()
    with torch.device("cpu"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = initialize_model(vllm_config=config)
        finally:
            torch.set_default_dtype(torch.float32)
        model.load_weights(iter(state.items()))
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


def _differing(left: Any, right: Any) -> list[str]:
    """Parameters that are not equal bit for bit, derived forms included."""
    others = dict(right.named_parameters())
    assert others.keys() == dict(left.named_parameters()).keys()
    return [
        name
        for name, parameter in left.named_parameters()
        if not torch.equal(
            parameter.data.contiguous().view(torch.uint8),
            others[name].data.contiguous().view(torch.uint8),
        )
    ]


def _followed(config: Any, store: str, states: list[State]) -> dict[str, Any]:
    """Differences of a rank that follows a store from one that loaded, version by version."""
    from harvester.contracts.ids import WeightVersion
    from weightsync.transport.location import StoreRoot
    from weightsync.vllm.engine_weights import EngineWeights
    from weightsync.vllm.prepared_version import RequestedVersion
    from weightsync.vllm.rank_parts import is_partial

    root = StoreRoot(os.environ["ROSEMUX_WEIGHT_ROOT"])
    # A constant that no version publishes, so that unwritten elements are seen.
    model = _built(config, {name: torch.full_like(t, 7) for name, t in states[0].items()})
    weights = EngineWeights(model, config.model_config, root, packed_ahead_bytes=0, sliced=True)
    seen: dict[str, Any] = {"partial": is_partial(model), "differing": [], "reports": []}
    for version, state in enumerate(states, start=1):
        weights.load(RequestedVersion(store=store, version=WeightVersion(version)))
        weights.release()
        seen["differing"].append(_differing(model, _built(config, state)))
        seen["reports"].append(weights.report())
    seen["held"] = sorted(name for name, _ in model.named_parameters())
    return seen


def _refusal(config: Any, store: str, state: State) -> str:
    """A rank's refusal of a store of another model."""
    from harvester.contracts.ids import WeightVersion
    from weightsync.transport.location import StoreRoot
    from weightsync.vllm.engine_weights import EngineWeights
    from weightsync.vllm.prepared_version import RequestedVersion

    root = StoreRoot(os.environ["ROSEMUX_WEIGHT_ROOT"])
    weights = EngineWeights(
        _built(config, state), config.model_config, root, packed_ahead_bytes=0, sliced=True
    )
    try:
        weights.load(RequestedVersion(store=store, version=WeightVersion(1)))
    except Exception as error:
        return str(error)
    return "none"


def _refused_copies(config: Any, state: State) -> dict[str, str]:
    """Refusals of a rank's model for each absorbed form that is a copy of the weight."""
    from weightsync.vllm.layers import check_layers

    model = _built(config, state)
    check_layers(model)
    name, layer = next((n, m) for n, m in model.named_modules() if hasattr(m, "W_UV"))
    refusals = {"layer": name}
    for form in ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep"):
        view = getattr(layer, form)
        setattr(layer, form, torch.nn.Parameter(layer.W_UV.clone(), requires_grad=False))
        try:
            check_layers(model)
        except Exception as error:
            refusals[form] = f"{type(error).__name__}: {error}"
        setattr(layer, form, view)
    check_layers(model)
    return refusals


def _initialise(config: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=_address()
        )
        parallel_state.ensure_model_parallel_initialized(1, 1)


def _address() -> str:
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port

    return str(get_distributed_init_method("127.0.0.1", get_open_port()))


def _published(stores: Path, name: str, states: list[State]) -> list[str]:
    from weightsync.publisher import Publisher

    with Publisher(stores / name) as publisher:
        return [publisher.publish(state).state_hash for state in states]


def main(root: Path) -> None:
    stores = Path(os.environ["ROSEMUX_WEIGHT_ROOT"])
    model = new_model(tied=True)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    second = {name: moved(tensor) for name, tensor in first.items()}
    for state in (first, second):
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    chains = {
        "layers": [first, second],
        "experts": list(checkpoints(root)),
        "latent": list(checkpoints(root / "latent", latent=True)),
    }
    untied = first | {"lm_head.weight": first["lm_head.weight"] * 2}
    layers = _config(saved(model, first, root / "layers"), pipeline_parallel_size=RANKS)
    experts = _config(str(root / "first"), tensor_parallel_size=RANKS, enable_expert_parallel=True)
    latent = _config(
        str(root / "latent" / "first"),
        tensor_parallel_size=RANKS,
        enable_expert_parallel=True,
        attention_backend="CPU_MLA",
    )
    _initialise(experts)
    seen: dict[str, Any] = {
        "published": {name: _published(stores, name, chain) for name, chain in chains.items()}
    }
    _published(stores, "untied", [untied])
    for rank in range(RANKS):
        with _as_rank(layers, rank, ("_PP",)):
            seen[f"layers_{rank}"] = _followed(layers, "layers", chains["layers"])
            seen[f"untied_{rank}"] = _refusal(layers, "untied", first)
        with _as_rank(experts, rank, ("_TP", "_EP")):
            seen[f"experts_{rank}"] = _followed(experts, "experts", chains["experts"])
        with _as_rank(latent, rank, ("_TP", "_EP")):
            seen[f"latent_{rank}"] = _followed(latent, "latent", chains["latent"])
            seen[f"copies_{rank}"] = _refused_copies(latent, chains["latent"][0])
    (root / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
