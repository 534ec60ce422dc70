"""States that change as in training, and a store with a few of them."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Published, Publisher

State = dict[str, torch.Tensor]


def _first_state() -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(50, 16, generator=generator).bfloat16(),
        "layer.bias": torch.randn(7, generator=generator),
        "layer.scale": torch.randn(33, generator=generator).to(torch.float8_e4m3fn),
        "layer.weight": torch.randn(40, 30, generator=generator).bfloat16(),
        "steps": torch.zeros(1, dtype=torch.int64),
    }


def _next_state(state: Mapping[str, torch.Tensor], seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in state.items():
        hit = torch.rand(tensor.shape, generator=generator) < 0.05
        moved = torch.where(hit, tensor.float() * 1.01, tensor.float())
        changed[name] = moved.to(tensor.dtype)
    changed["steps"] = state["steps"] + 1
    return changed


@pytest.fixture(scope="session")
def states() -> tuple[State, ...]:
    """Twelve consecutive states of several dtypes; most elements stay from one to the next."""
    run = [_first_state()]
    for seed in range(1, 12):
        run.append(_next_state(run[-1], seed))
    return tuple(run)


@pytest.fixture(scope="session")
def same() -> Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]:
    """Whether two states are equal bit for bit."""

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    return lambda left, right: (
        left.keys() == right.keys()
        and all(torch.equal(raw(left[name]), raw(right[name])) for name in left)
    )


@pytest.fixture
def blank(states: tuple[State, ...]) -> State:
    """A holder's own tensors before anything was received."""
    return {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}


@pytest.fixture
def published(tmp_path: Path, states: tuple[State, ...]) -> tuple[Path, list[Published]]:
    """A store with versions 1 to 8 and an anchor beside 5."""
    with Publisher(tmp_path / "store", versions=VersionSettings(anchor_every=4)) as publisher:
        done = [publisher.publish(state) for state in states[:8]]
    return tmp_path / "store", done
