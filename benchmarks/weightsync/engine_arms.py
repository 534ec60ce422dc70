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

from coserve.vllm.capabilities import capabilities, installed_vllm_version
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError
from harvester.platform.whole_file import write_whole

State = dict[str, torch.Tensor]

LEARNING_RATE = 1e-6
NOISE_RATIO = 0.23
"""Standard deviation of Adam's step in learning rates where gradients are noise (beta1 0.9)."""
STORE = "job"
_POLL_S = 0.005
FORM_FILE = "form.json"
"""The form of the engine, in the process's directory."""
RESULT_FILE = "result.json"
"""File of the repetitions so far: exists once the engine is up, and is whole at every moment."""


@dataclass
class Times:
    """Milliseconds, one of each per repetition."""

    stage: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    unstaged: list[float] = field(default_factory=list)
    native: list[float] = field(default_factory=list)


class InProcessEngine:
    """A vLLM engine with steps and updates in this process."""

    def __init__(self, path: Path, arguments: dict[str, Any]) -> None:
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
            **arguments,
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
    form = json.loads((root / FORM_FILE).read_text())
    (path / "config.json").write_text(json.dumps(form["model"]))
    engine = InProcessEngine(path, form["arguments"])

    from weightsync.publisher import Publisher

    generator = torch.Generator(form["device"]).manual_seed(1)
    state = first_state(form["model"], generator)
    params = sum(tensor.numel() for tensor in state.values())

    def keep(times: Times, changed: int) -> None:
        found = _result(times, params, changed / params)
        write_whole(root / RESULT_FILE, json.dumps(found))

    keep(Times(), 0)
    with Publisher(root / "stores" / STORE) as publisher:
        publisher.publish(state)
        _measure(engine, publisher, state, generator, repetitions, keep)


def _measure(
    engine: InProcessEngine,
    publisher: Any,
    state: State,
    generator: torch.Generator,
    repetitions: int,
    keep: Callable[[Times, int], None],
) -> None:
    """`keep` takes the times so far and the elements that the last step changed, after each
    repetition."""
    clock = MonotonicClock()
    engine.update(1, clock)
    has_native = capabilities(installed_vllm_version()).checkpoint_patches
    times = Times()
    for repetition in range(-1, repetitions):
        kept = times if repetition >= 0 else Times()
        for unstaged in (False, True):
            following = next_state(state, generator)
            version = publisher.publish(following).version
            _ours(engine, version, clock, kept, unstaged)
            state = following
        ahead = next_state(state, generator)
        changed = _changed(state, ahead)
        if has_native:
            for patches in (_patches(state, ahead), _patches(ahead, state)):
                started = clock.now()
                engine.on_model(partial(_native, patches))
                kept.native.append((clock.now() - started) * 1e3)
        if repetition >= 0:
            keep(times, changed)


def _ours(
    engine: InProcessEngine, version: int, clock: MonotonicClock, times: Times, unstaged: bool
) -> None:
    if not unstaged:
        started, waiting = clock.now(), threading.Event()
        while (staging := engine.call("rosemux_stage", store=STORE, version=version))[
            "state"
        ] != "ready":
            if staging["state"] == "failed":
                raise ConfigError(f"version {version} cannot be staged: {staging['message']}")
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


def _changed(old: State, new: State) -> int:
    """Elements of other bits."""
    bits = torch.int16
    return sum(int((old[name].view(bits) != new[name].view(bits)).sum()) for name in new)


def first_state(model: dict[str, Any], generator: torch.Generator) -> State:
    """Weights as a transformer is initialised with them."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.device("meta"):
        shapes = Qwen2ForCausalLM(Qwen2Config(**model)).state_dict()
    return {
        name: (_drawn(torch.randn, tensor, generator) * 0.02).bfloat16().cpu()
        for name, tensor in shapes.items()
        if name != "lm_head.weight"
    }


def next_state(state: State, generator: torch.Generator) -> State:
    return {name: _stepped(tensor, generator) for name, tensor in state.items()}


def _stepped(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """An Adam-like step on a master weight that lies anywhere in the value's rounding interval.

    Computed on the generator's device; the state stays on the host.
    """
    value = tensor.to(generator.device).float()
    _, exponent = torch.frexp(value)
    ulp = torch.ldexp(torch.ones_like(value), exponent - 8)
    master = value + (_drawn(torch.rand, value, generator) - 0.5) * ulp
    step = LEARNING_RATE * NOISE_RATIO * _drawn(torch.randn, value, generator)
    return (master - step).bfloat16().cpu()


def _drawn(
    draw: Callable[..., torch.Tensor], like: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    return draw(like.shape, generator=generator, device=generator.device)


def _result(times: Times, params: int, changed_ratio: float) -> dict[str, Any]:
    return {
        "params": params,
        "repetitions": len(times.pause),
        "ours_ms": _median(times.ours),
        "native_ms": _median(times.native),
        "pause_ms": _median(times.pause),
        "stage_ms": _median(times.stage),
        "unstaged_pause_ms": _median(times.unstaged),
        "changed_ratio": changed_ratio,
        "spread_ms": {
            name: [min(values), max(values)] for name, values in vars(times).items() if values
        },
    }


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
