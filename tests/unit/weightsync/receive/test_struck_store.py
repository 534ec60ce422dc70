"""A broken directory stops only receivers that need it, and none ends on wrong bits."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from harvester.contracts.errors import Corrupt, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.follower import Follower
from weightsync.layout.names import Kind, VersionRef
from weightsync.publisher import Published
from weightsync.reading.store import Store
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]
Strike = Callable[[Path], None]
SHARD = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
EIGHT = WeightVersion(8)


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(bytes(raw))


STRIKES: dict[str, Strike] = {
    "a bit of its header": lambda directory: _flip(directory / SHARD, 3),
    "a bit of its tensors": lambda directory: _flip(directory / SHARD, -5),
    "its shard cut": lambda directory: (directory / SHARD).write_bytes(b"x" * 100) and None,
    "its shard gone": lambda directory: (directory / SHARD).unlink(),
    "its index cut": lambda directory: _cut(directory / INDEX),
    "its index of another format": lambda directory: _age(directory / INDEX),
    "no READY": lambda directory: (directory / "READY").unlink(),
}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def _age(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))


@pytest.fixture(params=sorted(STRIKES))
def strike(request: pytest.FixtureRequest) -> Strike:
    return STRIKES[request.param]


def _reached(store: Path, held: int | None, states: tuple[State, ...]) -> State:
    """State of a fresh process after a sync to version 8."""
    at = None if held is None else WeightVersion(held)
    tensors = {
        name: torch.zeros_like(tensor) if held is None else tensor.clone()
        for name, tensor in states[(held or 1) - 1].items()
    }
    receiver = Receiver(store)
    try:
        applied = receiver.sync(at, EIGHT, TensorTarget(tensors))
    finally:
        receiver.close()
    assert applied.version == EIGHT
    return tensors


@pytest.mark.parametrize("held", [None, 1, 4, 5, 7])
def test_a_struck_anchor_stops_no_follower(
    published: tuple[Path, list[Published]],
    states: tuple[State, ...],
    same: Same,
    strike: Strike,
    held: int | None,
) -> None:
    store, _ = published
    strike(store / "anchor_v000005")
    assert same(_reached(store, held, states), states[7])


def test_a_struck_anchor_stops_no_checkpoint_directory(
    published: tuple[Path, list[Published]],
    states: tuple[State, ...],
    tmp_path: Path,
    strike: Strike,
) -> None:
    store, done = published
    strike(store / "anchor_v000005")
    for fresh in (True, False):
        with Follower(Receiver(store), tmp_path / f"policy-{fresh}") as follower:
            if not fresh:
                follower.pull(WeightVersion(4))
            pulled = follower.pull()
        assert (pulled.version, pulled.state_hash) == (EIGHT, done[7].state_hash)


def test_a_holder_of_a_version_needs_the_next_delta_alone(
    published: tuple[Path, list[Published]], states: tuple[State, ...], same: Same, strike: Strike
) -> None:
    store, _ = published
    for directory in ("anchor_v000005", "weight_v000001"):
        strike(store / directory)
    for version in range(2, 8):
        shutil.rmtree(store / f"weight_v{version:06d}")
    assert same(_reached(store, 7, states), states[7])


def test_a_struck_delta_is_passed_by_a_newer_anchor_and_else_refused_with_nothing_touched(
    published: tuple[Path, list[Published]], states: tuple[State, ...], same: Same, strike: Strike
) -> None:
    store, _ = published
    strike(store / "weight_v000003")
    assert same(_reached(store, 2, states), states[7])
    strike(store / "weight_v000007")
    tensors = {name: tensor.clone() for name, tensor in states[1].items()}
    with pytest.raises(RoseMuxError):
        Receiver(store).sync(WeightVersion(2), EIGHT, TensorTarget(tensors))
    assert same(tensors, states[1])


def test_wrong_bits_that_a_holder_says_are_a_version_are_found_without_any_checkpoint(
    published: tuple[Path, list[Published]], states: tuple[State, ...]
) -> None:
    store, _ = published
    for directory in ("anchor_v000005", "weight_v000001"):
        shutil.rmtree(store / directory)
    tensors = {name: tensor.clone() for name, tensor in states[6].items()}
    tensors["layer.weight"].view(torch.int16)[0, 0] ^= 1
    with pytest.raises(RoseMuxError):
        Receiver(store).sync(WeightVersion(7), EIGHT, TensorTarget(tensors))


@pytest.mark.parametrize("name", [SHARD, "READY"])
def test_a_version_that_is_pruned_while_it_is_read_is_stale(
    published: tuple[Path, list[Published]], name: str
) -> None:
    store, _ = published
    reader = Store(store)
    ref = VersionRef(Kind.ANCHOR, WeightVersion(5))
    manifest = reader.manifest(ref)
    (store / ref.directory / name).unlink()
    with pytest.raises(Corrupt, match=name):
        reader.manifest(ref) if name == "READY" else reader.layout(ref, manifest)
    (store / ref.directory / INDEX).unlink()
    with pytest.raises(Stale, match=r"pruned|gone"):
        reader.manifest(ref) if name == "READY" else reader.layout(ref, manifest)


def test_a_joiner_whose_checkpoint_is_pruned_takes_another(
    published: tuple[Path, list[Published]],
    states: tuple[State, ...],
    same: Same,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, _ = published
    layout = Store.layout

    def pruned_first(self: Store, ref: VersionRef, manifest: object) -> object:
        shutil.rmtree(store / "anchor_v000005", ignore_errors=True)
        return layout(self, ref, manifest)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "layout", pruned_first)
    assert same(_reached(store, None, states), states[7])


@pytest.mark.parametrize("held", [None, 4])
def test_an_anchor_is_judged_by_its_own_index_and_not_by_the_delta_s(
    published: tuple[Path, list[Published]], states: tuple[State, ...], same: Same, held: int | None
) -> None:
    store, done = published
    index = store / "weight_v000005" / INDEX
    index.write_text(index.read_text().replace(done[4].state_hash, "0" * 32))
    at = None if held is None else WeightVersion(held)
    tensors = {name: tensor.clone() for name, tensor in states[(held or 1) - 1].items()}
    Receiver(store).sync(at, WeightVersion(5), TensorTarget(tensors))
    assert same(tensors, states[4])
