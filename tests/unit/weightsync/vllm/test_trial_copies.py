"""The result of an update is known before anything is touched."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from harvester.contracts.errors import Corrupt
from weightsync.elements.bits import spec_of
from weightsync.publisher import Published
from weightsync.receive.staged import Staged
from weightsync.receiver import Receiver
from weightsync.vllm.in_place import tried_on_copies
from weightsync.vllm.loader_map import LoaderMap, traced

State = dict[str, torch.Tensor]
PLENTY = 1 << 30


class Model(torch.nn.Module):
    """Each tensor in a separate storage; the weight has a row of padding."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.held = {name: torch.nn.Parameter(t.clone(), False) for name, t in state.items()}
        rows, columns = state["layer.weight"].shape
        self.weight = torch.nn.Parameter(torch.zeros(rows + 1, columns).bfloat16(), False)
        self.held["layer.weight"] = torch.nn.Parameter(self.weight.data[:rows], False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.held[name].data.copy_(tensor)


@pytest.fixture
def model(states: tuple[State, ...]) -> Model:
    return Model(states[0])


@pytest.fixture
def target(model: Model, states: tuple[State, ...]) -> LoaderMap:
    """A loader map at version 3 of the store."""
    layout = {name: spec_of(tensor) for name, tensor in states[0].items()}
    made = traced(model, layout, lambda touched: None)
    model.load_weights(states[2].items())
    return made


@pytest.fixture
def staged(published: tuple[Path, list[Published]]) -> Staged:
    """The staging from version 3 to 4."""
    store, done = published
    return Receiver(store).prepare(done[2].version, done[3].version)


def packed(layer: Any, weight: torch.Tensor) -> Any:
    return lambda x, *_: weight.sum()


def layers_of(model: Model) -> dict[int, list[Any]]:
    return {model.weight.untyped_storage().data_ptr(): [model]}


def test_packed_forms_are_made_of_the_next_weights_while_the_held_ones_stay(
    target: LoaderMap,
    staged: Staged,
    model: Model,
    states: tuple[State, ...],
    pool: ThreadPoolExecutor,
) -> None:
    seen: list[torch.Tensor] = []

    def pack(layer: Any, weight: torch.Tensor) -> Any:
        seen.append(weight)
        return packed(layer, weight)

    trial = tried_on_copies(target, staged, layers_of(model), pack, pool, budget_bytes=PLENTY)
    assert list(trial.forms) == [model]
    (weight,) = seen
    assert torch.equal(weight[:-1], states[3]["layer.weight"])
    assert torch.equal(weight[-1], model.weight[-1])
    assert torch.equal(model.weight[:-1], states[2]["layer.weight"])


def test_a_base_that_is_not_what_the_delta_builds_on_is_found_before_anything_is_touched(
    target: LoaderMap, staged: Staged, model: Model, pool: ThreadPoolExecutor
) -> None:
    before = model.held["layer.bias"].clone()
    before[0] += 1
    model.held["layer.bias"].data.copy_(before)
    with pytest.raises(Corrupt, match="version 4 on top of this engine's weights"):
        tried_on_copies(target, staged, {}, packed, pool, budget_bytes=PLENTY)
    assert torch.equal(model.held["layer.bias"], before)


def test_layers_over_the_budget_are_left_for_the_pause(
    target: LoaderMap, staged: Staged, model: Model, pool: ThreadPoolExecutor
) -> None:
    size = model.weight.nbytes
    layers = layers_of(model)
    for budget_bytes, made in ((size - 1, []), (size, [model])):
        trial = tried_on_copies(target, staged, layers, packed, pool, budget_bytes=budget_bytes)
        assert list(trial.forms) == made


def test_a_full_checkpoint_is_packed_ahead_whatever_the_engine_holds(
    target: LoaderMap,
    model: Model,
    published: tuple[Path, list[Published]],
    states: tuple[State, ...],
    pool: ThreadPoolExecutor,
) -> None:
    store, done = published
    full = Receiver(store).prepare(None, done[3].version)
    model.held["layer.weight"].data.zero_()
    seen: list[torch.Tensor] = []

    def pack(layer: Any, weight: torch.Tensor) -> Any:
        seen.append(weight)
        return packed(layer, weight)

    tried_on_copies(target, full, layers_of(model), pack, pool, budget_bytes=PLENTY)
    assert torch.equal(seen[0][:-1], states[3]["layer.weight"])
