"""A copy that outlives its publisher: the chain goes on, and only a true copy is believed."""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import WeightVersion
from weightsync.layout.durable import write_durably
from weightsync.publish.directory_writer import WritableDirectory
from weightsync.publish.last_published import MappedFile
from weightsync.publish.settings import VersionSettings, WorkSettings
from weightsync.publisher import Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]


@pytest.fixture
def begun(tmp_path: Path, states: tuple[State, ...]) -> tuple[Path, Path]:
    """A store with versions 1 and 2, and the copy that its publisher left."""
    store, copy_dir = tmp_path / "store", tmp_path / "copy"
    with Publisher(store, work=WorkSettings(copy_dir=copy_dir)) as publisher:
        publisher.publish(states[0])
        assert not publisher.publish(states[1]).is_full
    return store, copy_dir


def _received(store: Path, version: int, like: State) -> State:
    held = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    Receiver(store).sync(None, WeightVersion(version), TensorTarget(held))
    return held


def test_a_record_that_is_a_pipe_is_no_copy(
    begun: tuple[Path, Path], states: tuple[State, ...], same: Same
) -> None:
    store, copy_dir = begun
    (copy_dir / "copy-00000.json").unlink()
    os.mkfifo(copy_dir / "copy-00000.json")
    with Publisher(store, work=WorkSettings(copy_dir=copy_dir)) as publisher:
        assert publisher.publish(states[2]).is_full
    assert same(_received(store, 3, states[0]), states[2])


def test_a_restarted_publisher_goes_on_with_a_delta(
    begun: tuple[Path, Path], states: tuple[State, ...], same: Same
) -> None:
    store, copy_dir = begun
    for version in (3, 4):
        with Publisher(store, work=WorkSettings(copy_dir=copy_dir)) as publisher:
            step = publisher.publish(iter(states[version - 1].items()))
        assert (step.version, step.is_full) == (version, False)
        assert same(_received(store, version, states[0]), states[version - 1])


def test_tied_names_stay_tied_over_a_restart(tmp_path: Path) -> None:
    weight = torch.arange(64.0)
    state = {"embed": weight, "head": weight}
    for value in range(3):
        weight[5] = value
        with Publisher(
            tmp_path / "store", work=WorkSettings(copy_dir=tmp_path / "copy")
        ) as publisher:
            step = publisher.publish(state)
        assert step.is_full == (value == 0)
        received = _received(tmp_path / "store", step.version, state)
        assert torch.equal(received["embed"], weight)
        assert torch.equal(received["head"], weight)
    assert (tmp_path / "copy" / "copy-00000.bin").stat().st_size == 256


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["copy-00000.bin", "copy-00000.json"])
@pytest.mark.parametrize("damage", [_flip, _cut, Path.unlink])
def test_a_torn_copy_is_thrown_away(
    begun: tuple[Path, Path],
    states: tuple[State, ...],
    same: Same,
    name: str,
    damage: Callable[[Path], None],
) -> None:
    store, copy_dir = begun
    damage(copy_dir / name)
    with Publisher(store, work=WorkSettings(copy_dir=copy_dir)) as publisher:
        assert publisher.publish(states[2]).is_full
        assert not publisher.publish(states[3]).is_full
    assert same(_received(store, 4, states[0]), states[3])


def test_a_copy_of_another_store_is_thrown_away(
    begun: tuple[Path, Path], tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    _, copy_dir = begun
    with Publisher(tmp_path / "other") as publisher:
        publisher.publish(states[5])
        publisher.publish(states[6])
    with Publisher(tmp_path / "other", work=WorkSettings(copy_dir=copy_dir)) as publisher:
        assert publisher.publish(states[7]).is_full
    assert same(_received(tmp_path / "other", 3, states[0]), states[7])


def test_a_copy_that_is_behind_its_store_is_thrown_away(
    begun: tuple[Path, Path], tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    store, copy_dir = begun
    shutil.copytree(copy_dir, tmp_path / "before")
    with Publisher(store, work=WorkSettings(copy_dir=copy_dir)) as publisher:
        publisher.publish(states[2])
    with Publisher(store, work=WorkSettings(copy_dir=tmp_path / "before")) as publisher:
        assert publisher.publish(states[3]).is_full
    assert same(_received(store, 4, states[0]), states[3])


def test_a_copy_with_a_new_store_is_thrown_away(
    begun: tuple[Path, Path], tmp_path: Path, states: tuple[State, ...]
) -> None:
    with Publisher(tmp_path / "new", work=WorkSettings(copy_dir=begun[1])) as publisher:
        assert publisher.publish(states[0]).is_full


def test_a_copy_that_went_wrong_makes_no_anchor_and_a_full_version_follows(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    """Bits of a tensor that does not change are flipped in the mapped file."""
    store, still = tmp_path / "store", torch.zeros(1000)
    copy = tmp_path / "copy" / "copy-00000.bin"

    def flip(path: Path, chunks: Iterable[Any]) -> int:
        size = write_durably(path, chunks)
        # LATEST is written under a temporary name, before it is renamed.
        if "LATEST" in path.name and (store / "weight_v000002").exists():
            with copy.open("r+b") as file:
                file.seek(100)
                file.write(b"\x01")
        return size

    with Publisher(
        WritableDirectory(store, write=flip),
        versions=VersionSettings(anchor_every=1),
        work=WorkSettings(copy_dir=tmp_path / "copy"),
    ) as publisher:
        publisher.publish({"a": still, "b": states[0]["layer.weight"]})
        torn = publisher.publish({"a": still, "b": states[1]["layer.weight"]})
        assert not torn.is_full
        whole = {"a": still, "b": states[2]["layer.weight"]}
        step = publisher.publish(whole)
        assert step.is_full
        assert step.anchor_fault.startswith("version 2 has no anchor: the publisher's copy")
    assert not list(store.glob("anchor_*"))
    assert same(_received(store, 3, whole), whole)


def test_a_copy_has_one_publisher(begun: tuple[Path, Path], tmp_path: Path) -> None:
    store, copy_dir = begun
    with (
        Publisher(store, work=WorkSettings(copy_dir=copy_dir)),
        pytest.raises(ConfigError, match="another publisher's copy_dir"),
    ):
        Publisher(tmp_path / "second", work=WorkSettings(copy_dir=copy_dir))


def test_a_full_version_that_never_became_the_newest_is_no_chain_s_beginning(
    begun: tuple[Path, Path], states: tuple[State, ...], same: Same
) -> None:
    """A trainer on another machine, without the copy, ended before LATEST named its version 3."""
    store, copy_dir = begun
    latest = (store / "LATEST").read_bytes()
    with Publisher(store) as elsewhere:
        assert elsewhere.publish(states[2]).is_full
    (store / "LATEST").write_bytes(latest)
    with Publisher(
        store, work=WorkSettings(copy_dir=copy_dir), versions=VersionSettings(keep_versions=1)
    ) as publisher:
        step = publisher.publish(states[2])
    assert (step.version, step.is_full) == (4, False)
    assert same(_received(store, 4, states[0]), states[2])


def test_a_record_that_cannot_be_written_costs_a_restart_a_full_version_and_nothing_else(
    begun: tuple[Path, Path],
    states: tuple[State, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, copy_dir = begun

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with Publisher(store, work=WorkSettings(copy_dir=copy_dir)) as publisher:
        monkeypatch.setattr(MappedFile, "record", full_disk)
        assert publisher.publish(states[2]).version == 3
        assert not publisher.publish(states[3]).is_full
    monkeypatch.undo()
    with Publisher(store, work=WorkSettings(copy_dir=copy_dir)) as publisher:
        step = publisher.publish(states[0])
    assert (step.version, step.is_full) == (5, True)
