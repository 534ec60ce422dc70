"""The files of a checkpoint directory: loaded by other readers, or refused."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harvester.contracts.errors import ConfigError, Corrupt, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import bits_of, spec_of
from weightsync.layout.apply_journal import Applying, Held, write_record
from weightsync.receive.checkpoint import Checkpoint, check_ours, reading, write_checkpoint

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]
INDEX = "model.safetensors.index.json"


def written(directory: Path, state: State, *, max_bytes: int = 4 << 30) -> None:
    directory.mkdir(exist_ok=True)
    layout = {name: spec_of(tensor) for name, tensor in state.items()}
    write_checkpoint(directory, layout, lambda name: bits_of(state[name]), max_bytes=max_bytes)


def loaded(directory: Path) -> State:
    found: State = {}
    for shard in directory.glob("*.safetensors"):
        found |= load_file(shard)
    return found


@pytest.mark.parametrize("max_bytes", [1, 1000, 1 << 20])
def test_another_library_loads_what_is_written(
    tmp_path: Path, states: tuple[State, ...], same: Same, max_bytes: int
) -> None:
    written(tmp_path, states[0], max_bytes=max_bytes)
    assert same(loaded(tmp_path), states[0])


def test_changed_bits_are_in_the_files(tmp_path: Path, states: tuple[State, ...]) -> None:
    written(tmp_path, states[0])
    checkpoint = Checkpoint(tmp_path)
    bits = checkpoint.bits("layer.bias")
    bits[3] = 0x7FC00001
    checkpoint.commit("layer.bias", bits)
    checkpoint.finish(["layer.bias"])
    assert loaded(tmp_path)["layer.bias"].view(torch.int32)[3] == 0x7FC00001


def test_other_tensors_replace_the_shards_of_before(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    written(tmp_path, states[0], max_bytes=1000)
    other = {"head.weight": torch.ones(3, 3)}
    written(tmp_path, other)
    assert same(loaded(tmp_path), other)
    assert Checkpoint(tmp_path).layout().keys() == other.keys()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _overlapping(path: Path) -> None:
    raw = path.read_bytes()
    assert b"[0,8],[0,8]".join([b"", b""]) not in raw
    path.write_bytes(raw.replace(b"[8,36]", b"[0,28]", 1))


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: (directory / INDEX).unlink(),
        lambda directory: (directory / INDEX).write_text('{"weight_map": {"../x": "../y"}}'),
        lambda directory: (directory / INDEX).write_text('{"weight_map": {}}'),
        lambda directory: _cut(next(directory.glob("*.safetensors"))),
        lambda directory: next(directory.glob("*.safetensors")).write_bytes(b""),
        lambda directory: next(directory.glob("*.safetensors")).unlink(),
        lambda directory: _overlapping(next(directory.glob("*.safetensors"))),
    ],
)
def test_a_broken_checkpoint_is_not_opened(
    tmp_path: Path, states: tuple[State, ...], damage: Callable[[Path], None]
) -> None:
    written(tmp_path, states[0])
    damage(tmp_path)
    with pytest.raises(Corrupt):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_foreign_weights_are_not_replaced(tmp_path: Path, name: str) -> None:
    check_ours(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    check_ours(tmp_path)
    written(tmp_path, {"w": torch.ones(3)})
    check_ours(tmp_path)
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match="name another directory"):
        check_ours(tmp_path)


def held(version: int) -> Held:
    return Held(
        version=WeightVersion(version),
        state_hash="",
        contents_hash="",
        sequence=2 * version,
        digests={},
    )


def test_a_reader_sees_that_nothing_changed_meanwhile(tmp_path: Path) -> None:
    write_record(tmp_path, held(7))
    with reading(tmp_path) as record:
        assert record.version == 7


def test_a_reader_sees_an_apply_in_progress_and_one_that_began(tmp_path: Path) -> None:
    applying = Applying(
        version=WeightVersion(8),
        state_hash="",
        contents_hash="",
        base_version=None,
        base_state_hash=None,
        sequence=15,
        before={},
        after={},
    )
    write_record(tmp_path, held(7))
    with pytest.raises(Stale, match="changed while"), reading(tmp_path):
        write_record(tmp_path, applying)
    with pytest.raises(Stale, match="in progress"), reading(tmp_path):
        pytest.fail("nothing may be read")
