"""Many small tensors: their changes stay as they lie in the file, and are worth what others are."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.encoding.plain import PlainDelta
from weightsync.publisher import Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]
ONE, TWO, THREE = (WeightVersion(number) for number in (1, 2, 3))


def _moved(state: State, seed: int, ratio: float) -> State:
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in state.items():
        hit = torch.rand(tensor.shape, generator=generator) < ratio
        moved[name] = (tensor.view(torch.int16) + hit.short()).view(torch.bfloat16)
    return moved


def _states(tensors: int, elements: int, ratio: float) -> list[State]:
    generator = torch.Generator().manual_seed(0)
    states = [
        {
            f"expert.{n}": torch.randn(elements, generator=generator).bfloat16()
            for n in range(tensors)
        }
    ]
    for seed in (1, 2):
        states.append(_moved(states[-1], seed, ratio))
    return states


def _published(store: Path, states: list[State]) -> Path:
    with Publisher(store) as publisher:
        for state in states:
            publisher.publish(state)
    return store


def test_changes_of_small_tensors_stay_as_they_lie(tmp_path: Path, same: Same) -> None:
    states = _states(tensors=200, elements=512, ratio=0.01)
    receiver = Receiver(_published(tmp_path / "store", states))
    mine = {name: tensor.clone() for name, tensor in states[0].items()}
    staged = receiver.prepare(ONE, THREE)
    found = [delta for deltas in staged.deltas.values() for delta in deltas]
    assert len(found) > 350
    assert all(isinstance(delta, PlainDelta) for delta in found)
    receiver.apply(staged, TensorTarget(mine))
    assert same(mine, states[2])


def test_a_file_of_compressed_changes_is_not_kept_for_a_few_plain_ones(
    tmp_path: Path, same: Same
) -> None:
    states = _states(tensors=4, elements=40_000, ratio=0.02)
    for state in states:
        state["norm"] = torch.ones(64, dtype=torch.bfloat16) * float(state["expert.0"][0])
    receiver = Receiver(_published(tmp_path / "store", states))
    mine = {name: tensor.clone() for name, tensor in states[0].items()}
    staged = receiver.prepare(ONE, TWO)
    assert not any(isinstance(d, PlainDelta) for deltas in staged.deltas.values() for d in deltas)
    receiver.apply(staged, TensorTarget(mine))
    assert same(mine, states[1])


def test_a_holder_of_something_else_is_found_out(tmp_path: Path) -> None:
    states = _states(tensors=50, elements=512, ratio=0.01)
    receiver = Receiver(_published(tmp_path / "store", states))
    mine = {name: tensor.clone() for name, tensor in states[0].items()}
    mine["expert.7"][3] += 1
    with pytest.raises(Corrupt):
        receiver.apply(receiver.prepare(ONE, TWO), TensorTarget(mine))
