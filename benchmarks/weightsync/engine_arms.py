"""The process of benchmarks/weightsync/engine.py: one engine, our updates and vLLM's in turn.

vLLM comes first: numba must not be loaded when a CPU worker of vLLM 0.32 starts.
"""

import json
import statistics
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harvester.contracts.clock import MonotonicClock

State = dict[str, torch.Tensor]

LEARNING_RATE = 1e-6
NOISE_RATIO = 0.23
"""Standard deviation of Adam's step in learning rates where gradients are noise (beta1 0.9)."""
STORE = "job"
_POLL_S = 0.005
_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@dataclass
class Times:
    """Milliseconds, one of each per repetition."""

    stage: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    unstaged: list[float] = field(default_factory=list)
    native: list[float] = field(default_factory=list)


class Engine:
    """A vLLM engine whose steps and updates share this process."""

    def __init__(self, path: Path) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=str(path),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=256,
            seed=0,
            weight_transfer_config={"backend": "rosemux"},
        )

    def call(self, method: str, **kwargs: Any) -> Any:
        return self._llm.collective_rpc(method, kwargs=kwargs)[0]

    def on_model(self, function: Callable[[torch.nn.Module], Any]) -> Any:
        return self._llm.apply_model(function)[0]

    def update(self, version: int, clock: MonotonicClock) -> tuple[float, float]:
        """Seconds of the update itself, and from its start to its end."""
        started = clock.now()
        self.call("start_weight_update")
        begun = clock.now()
        self.call("update_weights", update_info={"store": STORE, "version": version})
        updated = clock.now()
        self.call("finish_weight_update")
        return updated - begun, clock.now() - started


def main(root: Path, repetitions: int) -> None:
    path = root / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(_MODEL))
    engine = Engine(path)

    from weightsync.publisher import Publisher

    generator = torch.Generator().manual_seed(1)
    state = first_state(generator)
    with Publisher(root / "stores" / STORE) as publisher:
        publisher.publish(state)
        times, changed = _measured(engine, publisher, state, generator, repetitions)
    params = sum(tensor.numel() for tensor in state.values())
    (root / "result.json").write_text(json.dumps(_result(times, params, changed)))


def _measured(
    engine: Engine, publisher: Any, state: State, generator: torch.Generator, repetitions: int
) -> tuple[Times, float]:
    clock = MonotonicClock()
    engine.update(1, clock)
    times = Times()
    changed = 0.0
    for repetition in range(-1, repetitions):
        kept = times if repetition >= 0 else Times()
        for unstaged in (False, True):
            following = next_state(state, generator)
            version = publisher.publish(following).version
            _ours(engine, version, clock, kept, unstaged)
            state = following
        ahead = next_state(state, generator)
        forward, back = _patches(state, ahead), _patches(ahead, state)
        for patches in (forward, back):
            started = clock.now()
            engine.on_model(partial(_native, patches))
            kept.native.append((clock.now() - started) * 1e3)
        changed = sum(patch.values.numel() for patch in forward)
    return times, changed / sum(tensor.numel() for tensor in state.values())


def _ours(
    engine: Engine, version: int, clock: MonotonicClock, times: Times, unstaged: bool
) -> None:
    if not unstaged:
        started, waiting = clock.now(), threading.Event()
        while engine.call("rosemux_stage", store=STORE, version=version)["state"] != "ready":
            waiting.wait(_POLL_S)
        times.stage.append((clock.now() - started) * 1e3)
    update_s, pause_s = engine.update(version, clock)
    if unstaged:
        times.unstaged.append(pause_s * 1e3)
    else:
        times.ours.append(update_s * 1e3)
        times.pause.append(pause_s * 1e3)


def _native(patches: list[Any], model: torch.nn.Module) -> None:
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        load_checkpoint_weight_patches,
    )

    load_checkpoint_weight_patches(model, patches)


def _patches(old: State, new: State) -> list[Any]:
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

    patches = []
    for name, tensor in new.items():
        flat = tensor.flatten()
        indices = torch.nonzero(old[name].flatten().view(torch.int16) != flat.view(torch.int16))
        indices = indices.flatten()
        if indices.numel():
            patch = CheckpointWeightPatch(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                values=flat[indices],
                indices=indices.to(torch.int32),
            )
            patches.append(patch)
    return patches


def first_state(generator: torch.Generator) -> State:
    """Weights as a transformer is initialised with them."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**_MODEL))
    return {
        name: (torch.randn(tensor.shape, generator=generator) * 0.02).bfloat16()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }


def next_state(state: State, generator: torch.Generator) -> State:
    return {name: _stepped(tensor, generator) for name, tensor in state.items()}


def _stepped(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """An Adam-like step on a master weight that lies anywhere in the value's rounding interval."""
    value = tensor.float()
    _, exponent = torch.frexp(value)
    ulp = torch.ldexp(torch.ones_like(value), exponent - 8)
    master = value + (torch.rand(value.shape, generator=generator) - 0.5) * ulp
    step = LEARNING_RATE * NOISE_RATIO * torch.randn(value.shape, generator=generator)
    return (master - step).bfloat16()


def _result(times: Times, params: int, changed_ratio: float) -> dict[str, Any]:
    return {
        "params": params,
        "ours_ms": statistics.median(times.ours),
        "native_ms": statistics.median(times.native),
        "pause_ms": statistics.median(times.pause),
        "stage_ms": statistics.median(times.stage),
        "unstaged_pause_ms": statistics.median(times.unstaged),
        "changed_ratio": changed_ratio,
        "spread_ms": {name: [min(values), max(values)] for name, values in vars(times).items()},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
