"""Models whose loader computes are followed through that loader, from a full copy in memory."""

from collections.abc import Iterable
from pathlib import Path

import torch

from weightsync.elements.bits import spec_of
from weightsync.publisher import Published
from weightsync.receiver import Receiver
from weightsync.vllm.shadow_target import ShadowTarget

State = dict[str, torch.Tensor]


class ComputingModel(torch.nn.Module):
    """Stores twice what it loads and remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: State = {}
        self.loads: list[list[str]] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        self.loads.append(sorted(given))
        self.stored |= {name: tensor.float() * 2 for name, tensor in given.items()}


def test_changed_tensors_go_through_the_models_own_loader(
    published: tuple[Path, list[Published]], states: tuple[State, ...]
) -> None:
    store, done = published
    model = ComputingModel()
    repacked: list[bool] = []
    layout = {name: spec_of(tensor) for name, tensor in states[0].items()}
    target = ShadowTarget(model, layout, lambda: repacked.append(True))
    receiver = Receiver(store)
    applied = receiver.sync(None, done[6].version, target)
    applied = receiver.sync(applied.version, done[7].version, target)
    assert not applied.from_full
    assert applied.state_hash == done[7].state_hash
    assert model.loads[0] == sorted(states[0])
    assert repacked == [True, True]
    for name, tensor in states[7].items():
        assert torch.equal(model.stored[name], tensor.float() * 2)
