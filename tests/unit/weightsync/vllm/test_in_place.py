"""Deltas hashed while they are written end on the published state, or say that they do not."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from harvester.contracts.errors import Corrupt
from tests.virtual_clock import VirtualClock
from weightsync.elements.bits import Bits, spec_of
from weightsync.publisher import Published
from weightsync.receive.staged import Staged
from weightsync.receiver import Receiver
from weightsync.vllm import loader_map
from weightsync.vllm.in_place import Trial, applied_in_place, is_provable, tried_on_copies
from weightsync.vllm.loader_map import LoaderMap, traced

State = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """Keeps the weight transposed, so that it does not lie in one piece."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.held = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        self.held["layer.weight"] = torch.zeros_like(state["layer.weight"].t().contiguous()).t()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.held[name].copy_(tensor)

    def holds(self, state: State) -> bool:
        return all(torch.equal(self.held[n].float(), tensor.float()) for n, tensor in state.items())


@pytest.fixture
def model(states: tuple[State, ...]) -> Model:
    return Model(states[0])


@pytest.fixture
def target(model: Model, states: tuple[State, ...]) -> LoaderMap:
    """At version 2 of the store."""
    layout = {name: spec_of(tensor) for name, tensor in states[0].items()}
    made = traced(model, layout, lambda touched: None)
    model.load_weights(states[1].items())
    return made


def test_a_chain_ends_on_the_published_state_in_one_piece_or_not(
    target: LoaderMap,
    model: Model,
    published: tuple[Path, list[Published]],
    states: tuple[State, ...],
    pool: ThreadPoolExecutor,
) -> None:
    store, done = published
    staged = Receiver(store).prepare(done[1].version, done[4].version)
    assert is_provable(staged)
    applied = applied_in_place(staged, tried(staged, target, pool), target, pool, VirtualClock())
    assert target.flat_at("layer.weight") is None
    assert model.holds(states[4])
    assert applied.state_hash == done[4].state_hash
    assert not applied.from_full


@pytest.mark.parametrize("name", ["embed.weight", "layer.weight"])
def test_another_base_is_found(
    target: LoaderMap,
    model: Model,
    published: tuple[Path, list[Published]],
    pool: ThreadPoolExecutor,
    name: str,
) -> None:
    store, done = published
    staged = Receiver(store).prepare(done[1].version, done[2].version)
    trial = tried(staged, target, pool)
    model.held[name][0, 0] += 1
    with pytest.raises(Corrupt, match=f"{name} differs from the published"):
        applied_in_place(staged, trial, target, pool, VirtualClock())


def tried(staged: Staged, target: LoaderMap, pool: ThreadPoolExecutor) -> Trial:
    return tried_on_copies(target, staged, {}, lambda *_: None, pool, budget_bytes=0)


@pytest.fixture
def hashing_target(
    model: Model, states: tuple[State, ...], monkeypatch: pytest.MonkeyPatch
) -> LoaderMap:
    """At version 2, as if the host were an accelerator that hashes."""
    monkeypatch.setattr(loader_map, "HOST", "elsewhere")
    monkeypatch.setattr(loader_map, "is_proven", lambda device: True)
    layout = {name: spec_of(tensor) for name, tensor in states[0].items()}
    made = traced(model, layout, lambda touched: None)
    model.load_weights(states[1].items())
    return made


@pytest.fixture
def no_reads(hashing_target: LoaderMap, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, no tensor that is hashed on the device is read back."""
    read = hashing_target.bits

    def bits(name: str) -> Bits:
        assert name not in hashing_target.hashed_there
        return read(name)

    return lambda: monkeypatch.setattr(hashing_target, "bits", bits)


def test_a_tensor_on_a_device_is_hashed_there(
    hashing_target: LoaderMap,
    no_reads: Callable[[], None],
    model: Model,
    published: tuple[Path, list[Published]],
    states: tuple[State, ...],
    pool: ThreadPoolExecutor,
) -> None:
    store, done = published
    # The other one does not lie in one piece.
    assert hashing_target.hashed_there == states[0].keys() - {"layer.weight"}
    staged = Receiver(store).prepare(done[1].version, done[4].version)
    trial = tried(staged, hashing_target, pool)
    no_reads()
    applied = applied_in_place(staged, trial, hashing_target, pool, VirtualClock())
    assert model.holds(states[4])
    assert applied.state_hash == done[4].state_hash


def test_another_base_on_a_device_is_found(
    hashing_target: LoaderMap,
    no_reads: Callable[[], None],
    model: Model,
    published: tuple[Path, list[Published]],
    pool: ThreadPoolExecutor,
) -> None:
    store, done = published
    staged = Receiver(store).prepare(done[1].version, done[2].version)
    trial = tried(staged, hashing_target, pool)
    no_reads()
    model.held["embed.weight"][0, 0] += 1
    with pytest.raises(Corrupt, match=r"embed\.weight differs from the published"):
        applied_in_place(staged, trial, hashing_target, pool, VirtualClock())


def test_a_full_checkpoint_is_not_a_chain(published: tuple[Path, list[Published]]) -> None:
    store, done = published
    assert not is_provable(Receiver(store).prepare(None, done[4].version))
