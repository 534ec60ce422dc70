"""The supervised warm-up: a policy that knows the form of a line but plays with mistakes.

Makes the start of the RL job, and keeps it in a cache keyed by a hash of all its inputs. A cache
entry appears whole or not at all.
"""

import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from examples.grpo.demonstrator import Demonstration, MistakeRates, demonstration
from examples.grpo.environment import Task, TaskShape
from examples.grpo.master_weights import AdamSettings, MasterWeights
from examples.grpo.microbatch import microbatches
from examples.grpo.model import PolicyModel
from examples.grpo.policy_shape import PolicyShape
from harvester.contracts.clock import Clock, MonotonicClock

CODE_VERSION = 1
"""Part of every cache key: raise it when a change here alters what comes out."""

_LOG = logging.getLogger(__name__)
_MICROBATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Everything that the warm policy depends on."""

    seed: int = 1
    policy: PolicyShape = field(default_factory=PolicyShape)
    tasks: TaskShape = field(default_factory=TaskShape)
    mistakes: MistakeRates = field(default_factory=MistakeRates)
    steps: int = 120
    """Twice as many start the job at the same reward."""
    demonstrations_per_step: int = 12
    learning_rate: float = 2e-3

    def key(self) -> str:
        """A file name that is the same exactly where all inputs are."""
        named = json.dumps({"code": CODE_VERSION, **asdict(self)}, sort_keys=True)
        return blake2b(named.encode(), digest_size=12).hexdigest()

    def learning_rate_at(self, step: int) -> float:
        """Up over the first tenth, then along a half cosine to a twentieth."""
        rising = max(1, self.steps // 10)
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        share = (step - rising) / max(1, self.steps - rising)
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


@dataclass(frozen=True, slots=True)
class WarmStart:
    state: dict[str, Tensor]
    """Float32, under the checkpoint's names."""
    seconds: float
    from_cache: bool


def warm_start(warm_up: WarmUp, cache_directory: Path, *, clock: Clock | None = None) -> WarmStart:
    """The warm policy's weights, from the cache or trained now and cached."""
    clock = clock or MonotonicClock()
    started_s = clock.now()
    path = cache_directory / f"warm-{warm_up.key()}.safetensors"
    state = _cached(path, warm_up.policy)
    from_cache = state is not None
    if state is None:
        state = trained(warm_up)
        _write_whole(path, state)
    return WarmStart(state, clock.now() - started_s, from_cache)


def trained(warm_up: WarmUp) -> dict[str, Tensor]:
    """Imitates demonstrations from scratch; float32 weights under the checkpoint's names."""
    weights = MasterWeights(
        PolicyModel(warm_up.policy, seed=warm_up.seed),
        AdamSettings(learning_rate=warm_up.learning_rate, epsilon=1e-8),
    )
    stream = _demonstrations(warm_up)
    for step in range(warm_up.steps):
        batch = list(islice(stream, warm_up.demonstrations_per_step))
        loss = _imitate(weights, batch, learning_rate=warm_up.learning_rate_at(step))
        if step % 20 == 0 or step == warm_up.steps - 1:
            _LOG.info("warm-up step %d of %d: loss %.3f", step + 1, warm_up.steps, loss)
    return weights.masters()


def _demonstrations(warm_up: WarmUp) -> Iterator[Demonstration]:
    random = Random(f"warm-up/{warm_up.seed}")
    step = 0
    while True:
        # Steps below zero: no demonstration is ever a task of the RL job.
        step -= 1
        for prompt in range(warm_up.tasks.prompts_per_step):
            task = Task(warm_up.tasks, warm_up.seed, step, prompt)
            yield demonstration(task, warm_up.mistakes, random)


def _imitate(weights: MasterWeights, batch: list[Demonstration], *, learning_rate: float) -> float:
    outputs = sum(sum(one.is_output) for one in batch)
    total = 0.0
    for part in microbatches(batch, tokens_max=_MICROBATCH_TOKENS):
        logprobs, _ = part.output_logprobs(weights.policy)
        loss = -logprobs.sum() / outputs
        loss.backward()  # type: ignore[no-untyped-call]
        weights.add_gradients()
        total += float(loss.detach())
    weights.step(learning_rate=learning_rate)
    return total


def _cached(path: Path, shape: PolicyShape) -> dict[str, Tensor] | None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        return None
    try:
        state: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        _LOG.warning("%s is unreadable (%s): making it again", path.name, error)
        return None
    expected = {name: p.shape for name, p in PolicyModel(shape, seed=0).named_parameters()}
    if {name: tensor.shape for name, tensor in state.items()} != expected:
        _LOG.warning("%s holds other tensors than this policy's: making it again", path.name)
        return None
    return state


def _write_whole(path: Path, state: dict[str, Tensor]) -> None:
    from safetensors.torch import save

    content = save(state)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def use_one_thread() -> None:
    """The whole job lives on one core; more threads would only wait for each other."""
    torch.set_num_threads(1)
