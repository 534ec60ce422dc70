"""The contract of apply targets; each target passes the same suite."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Bits, bits_of, spec_of
from weightsync.encoding.codec import Encoding
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Publisher
from weightsync.receive.checkpoint import Checkpoint, write_checkpoint
from weightsync.receive.target import ApplyTarget, TensorTarget
from weightsync.receiver import Receiver

State = dict[str, torch.Tensor]
Opened = Callable[[], ApplyTarget]
ONE, TWO, THREE = (WeightVersion(v) for v in (1, 2, 3))


def first() -> State:
    generator = torch.Generator().manual_seed(3)
    return {
        "a.weight": torch.randn(31, 17, generator=generator).bfloat16(),
        "b.bias": torch.randn(9, generator=generator),
        "c.scale": torch.randn(21, generator=generator).to(torch.float8_e4m3fn),
        "d.empty": torch.zeros(0, 4),
        "e.steps": torch.zeros((), dtype=torch.int64),
    }


def moved(state: State) -> State:
    """Most elements stay; the scalar and a NaN with a payload change."""
    new = {name: tensor.clone() for name, tensor in state.items()}
    new["a.weight"].view(torch.int16)[::7] += 1
    new["b.bias"].view(torch.int32)[2] = 0x7FC00123
    new["c.scale"].view(torch.uint8)[5] ^= 0x81
    new["e.steps"] += 1
    return new


@pytest.fixture(params=["tensors", "checkpoint"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """A function that opens the holder of one blank model, repeatedly."""
    blank = {name: torch.zeros_like(tensor) for name, tensor in first().items()}
    if request.param == "tensors":
        return lambda: TensorTarget(blank)
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    layout = {name: spec_of(tensor) for name, tensor in blank.items()}
    write_checkpoint(directory, layout, lambda name: bits_of(blank[name]))
    return lambda: Checkpoint(directory)


@pytest.fixture
def states() -> list[State]:
    second = moved(first())
    return [first(), second, moved(second)]


@pytest.fixture
def receiver(tmp_path: Path, states: list[State]) -> Receiver:
    with Publisher(tmp_path / "store") as publisher:
        for state in states:
            publisher.publish(state)
    return Receiver(tmp_path / "store")


def bits(target: ApplyTarget) -> dict[str, bytes]:
    return {name: target.bits(name).tobytes() for name in target.layout()}


def wanted(state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bits_of(tensor).tobytes() for name, tensor in state.items()}


def test_it_ends_on_each_state_and_still_holds_it_when_opened_again(
    opened: Opened, receiver: Receiver, states: list[State]
) -> None:
    current = None
    for version, state in zip((ONE, TWO, THREE), states, strict=True):
        receiver.sync(current, version, opened())
        assert bits(opened()) == wanted(state)
        current = version


def test_its_layout_is_the_checkpoint_s(opened: Opened) -> None:
    assert opened().layout() == {name: spec_of(tensor) for name, tensor in first().items()}


def test_its_bits_are_flat_and_writable(opened: Opened) -> None:
    target = opened()
    for name, spec in target.layout().items():
        found: Bits = target.bits(name)
        assert (found.ndim, found.size, found.itemsize) == (1, spec.elements, spec.width_bytes)
        assert found.flags.writeable
        assert found.flags.aligned


@pytest.mark.parametrize("encoding", [*Encoding][1:])
def test_tied_tensors_follow_by_deltas(tmp_path: Path, encoding: Encoding) -> None:
    def tied(weight: torch.Tensor) -> State:
        return {"embed": weight, "head": weight, "norm": torch.ones(5)}

    run = [torch.randn(64, 32, generator=torch.Generator().manual_seed(at)) for at in range(3)]
    run[1], run[2] = run[0].clone(), run[0].clone()
    run[1][::9] *= 2.0
    run[2][::7] -= 3.0
    held, current = tied(torch.zeros(64, 32)), None
    with Publisher(tmp_path / "store", versions=VersionSettings(encoding=encoding)) as publisher:
        receiver = Receiver(tmp_path / "store")
        for version, weight in zip((ONE, TWO, THREE), run, strict=True):
            publisher.publish(tied(weight))
            applied = receiver.sync(current, version, TensorTarget(held))
            assert applied.from_full == (current is None)
            assert wanted(held) == wanted(tied(weight))
            current = version
    assert receiver.reapplied == 0


def test_it_is_not_touched_by_another_model_s_state(
    opened: Opened, tmp_path: Path, states: list[State]
) -> None:
    with Publisher(tmp_path / "other") as publisher:
        publisher.publish(states[0] | {"f.head": torch.ones(2)})
    before = bits(opened())
    with pytest.raises(ConfigError, match=r"does not fit this model: f\.head"):
        Receiver(tmp_path / "other").sync(None, ONE, opened())
    assert bits(opened()) == before
