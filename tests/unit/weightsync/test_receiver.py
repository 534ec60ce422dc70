"""Receiving: never on a state that is not a published one without saying so."""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harvester.contracts.errors import ConfigError, Corrupt, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Bits
from weightsync.layout.manifest import encoded_manifest
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Published, Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.transport.directory import DirectorySource

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]
Store = tuple[Path, list[Published]]
ONE, FIVE, SEVEN, EIGHT = (WeightVersion(v) for v in (1, 5, 7, 8))
SHARD = "model-00001-of-00001.safetensors"


class TornTarget(TensorTarget):
    """Fails once while the second tensor is written."""

    def __init__(self, tensors: State) -> None:
        super().__init__(tensors)
        self.commits = 0

    def commit(self, name: str, bits: Bits) -> None:
        self.commits += 1
        if self.commits == 2:
            raise RuntimeError("power cut")


class ForgetfulTarget(TensorTarget):
    """Loses one write after everything was committed, once."""

    def __init__(self, tensors: State) -> None:
        super().__init__(tensors)
        self.lost = False

    def finish(self, changed: Collection[str]) -> None:
        if not self.lost:
            self.lost = True
            self.bits("layer.bias")[0] ^= 1


def test_a_follower_ends_on_every_published_state(
    published: Store, states: tuple[State, ...], blank: State, same: Same
) -> None:
    store, done = published
    receiver = Receiver(store)
    current = None
    for step in done:
        applied = receiver.sync(current, step.version, TensorTarget(blank))
        assert same(blank, states[step.version - 1])
        assert applied.state_hash == step.state_hash
        assert applied.from_full == (step.version == 1)
        current = applied.version


def test_a_receiver_that_slept_takes_the_chain(
    published: Store, states: tuple[State, ...], blank: State, same: Same
) -> None:
    store, _ = published
    receiver = Receiver(store)
    receiver.sync(None, FIVE, TensorTarget(blank))
    applied = receiver.sync(FIVE, EIGHT, TensorTarget(blank))
    assert not applied.from_full
    assert same(blank, states[7])


def test_staging_touches_nothing(published: Store, blank: State) -> None:
    store, _ = published
    receiver = Receiver(store)
    receiver.stage(receiver.plan(None, EIGHT))
    assert all(not tensor.float().any() for tensor in blank.values())


def test_a_state_that_its_holder_does_not_expect_is_not_read(published: Store) -> None:
    store, done = published
    for shard in store.rglob("*.safetensors"):
        shard.unlink()

    def check(state_hash: str | None) -> None:
        assert state_hash == done[-1].state_hash
        raise Corrupt("of another run")

    with pytest.raises(Corrupt, match="of another run"):
        Receiver(store).prepare(None, done[-1].version, check=check)


@pytest.mark.parametrize("version", [None, "1", 1.0])
def test_a_version_that_is_no_number_is_refused(tmp_path: Path, version: Any) -> None:
    """`latest` of a store is None before the first publish."""
    with pytest.raises(ConfigError, match=f"version {version!r}: give a number"):
        Receiver(tmp_path).sync(None, version, TensorTarget({}))


@pytest.mark.parametrize("target_class", [TornTarget, ForgetfulTarget])
def test_a_torn_apply_ends_on_the_published_state(
    published: Store,
    states: tuple[State, ...],
    blank: State,
    same: Same,
    target_class: type[TornTarget] | type[ForgetfulTarget],
) -> None:
    store, _ = published
    receiver = Receiver(store)
    receiver.sync(None, SEVEN, TensorTarget(blank))
    applied = receiver.sync(SEVEN, EIGHT, target_class(blank))
    assert applied.from_full
    assert same(blank, states[7])


def test_a_wrong_base_is_noticed_and_repaired(
    published: Store, states: tuple[State, ...], blank: State, same: Same
) -> None:
    """The holder believes that it is at 7, but its weights are those of 5."""
    store, _ = published
    receiver = Receiver(store)
    receiver.sync(None, FIVE, TensorTarget(blank))
    staged = receiver.stage(receiver.plan(SEVEN, EIGHT))
    with pytest.raises(Corrupt, match="was published"):
        receiver.apply(staged, TensorTarget(blank))
    receiver.sync(SEVEN, EIGHT, TensorTarget(blank))
    assert same(blank, states[7])


def test_a_version_that_was_replaced_after_its_plan_is_seen_to_be_another(
    published: Store,
) -> None:
    """Its index was read for the plan."""
    store, done = published
    receiver = Receiver(store)
    plan = receiver.plan(None, ONE)
    index = store / "weight_v000001" / "model.safetensors.index.json"
    planned = DirectorySource(store).stamp(f"weight_v000001/{index.name}")
    os.utime(index, ns=(1, 1))
    staged = receiver.stage(plan)
    assert staged.stamp == planned
    state_hash = staged.expected.state_hash
    assert state_hash == done[0].state_hash
    assert not receiver.has_other(ONE, state_hash, staged.stamp)
    index.write_bytes(index.read_bytes().replace(done[0].state_hash.encode(), b"0" * 32))
    assert receiver.has_other(ONE, state_hash, staged.stamp)
    replaced = replace(staged.plan.manifest, section=None)
    index.write_bytes(encoded_manifest(replaced))
    os.utime(index, ns=(1, 1))
    assert receiver.has_other(ONE, None, staged.stamp)


def test_another_model_is_refused_before_anything_is_written(
    published: Store, blank: State
) -> None:
    store, _ = published
    blank["layer.bias"] = torch.zeros(8)
    with pytest.raises(ConfigError, match=r"does not fit this model: layer\.bias"):
        Receiver(store).sync(None, EIGHT, TensorTarget(blank))
    assert all(not tensor.float().any() for tensor in blank.values())


def _damages() -> dict[str, Callable[[Path], None]]:
    def flip(path: Path, at: float) -> None:
        raw = bytearray(path.read_bytes())
        raw[int(at * (len(raw) - 1))] ^= 0x10
        path.write_bytes(raw)

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-5])

    version = "weight_v000008"
    return {
        "payload flipped": lambda store: flip(store / version / SHARD, 0.9),
        "header flipped": lambda store: flip(store / version / SHARD, 0.01),
        "payload cut": lambda store: cut(store / version / SHARD),
        "payload lengthened": lambda store: _append(store / version / SHARD),
        "payload missing": lambda store: (store / version / SHARD).unlink(),
        "payload of another version": lambda store: _copy(
            store / "weight_v000007" / SHARD, store / version / SHARD
        ),
        "index flipped": lambda store: flip(store / version / "model.safetensors.index.json", 0.5),
        "index cut": lambda store: cut(store / version / "model.safetensors.index.json"),
        "index of another version": lambda store: _copy(
            store / "weight_v000007" / "model.safetensors.index.json",
            store / version / "model.safetensors.index.json",
        ),
        "not ready": lambda store: (store / version / "READY").unlink(),
        "version missing": lambda store: shutil.rmtree(store / version),
        "index nested without end": lambda store: _write(
            store / version / "model.safetensors.index.json", b"[" * 200_000
        ),
        "header nested without end": lambda store: _write(
            store / version / SHARD, (200_000).to_bytes(8, "little") + b"[" * 200_000
        ),
        "index names a base that never was": lambda store: _write(
            store / version / "model.safetensors.index.json",
            (store / version / "model.safetensors.index.json")
            .read_bytes()
            .replace(b'"base_version": "000007"', b'"base_version": "000000"'),
        ),
        "index is a directory": lambda store: _replace_by_directory(
            store / version / "model.safetensors.index.json"
        ),
        "payload is a directory": lambda store: _replace_by_directory(store / version / SHARD),
        "payload is a link to itself": lambda store: _replace_by_loop(store / version / SHARD),
        "index is a pipe": lambda store: _replace_by_pipe(
            store / version / "model.safetensors.index.json"
        ),
        "payload is a pipe": lambda store: _replace_by_pipe(store / version / SHARD),
        "LATEST is a pipe": lambda store: _replace_by_pipe(store / "LATEST"),
        "LATEST is a directory": lambda store: _replace_by_directory(store / "LATEST"),
    }


def _write(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _replace_by_pipe(path: Path) -> None:
    """Replace a file by a pipe without a writer: a reader that opens it waits for ever."""
    path.unlink()
    os.mkfifo(path)


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _copy(source: Path, destination: Path) -> None:
    destination.write_bytes(source.read_bytes())


@pytest.mark.parametrize("damage", _damages().values(), ids=_damages().keys())
def test_a_damaged_version_is_refused_and_recovers_once_it_is_whole_again(
    published: Store,
    states: tuple[State, ...],
    blank: State,
    same: Same,
    tmp_path: Path,
    damage: Callable[[Path], None],
) -> None:
    store, _ = published
    shutil.copytree(store, tmp_path / "whole")
    receiver = Receiver(store)
    receiver.sync(None, SEVEN, TensorTarget(blank))
    damage(store)
    with pytest.raises(RoseMuxError):
        receiver.sync(SEVEN, EIGHT, TensorTarget(blank))
    assert same(blank, states[6])
    shutil.rmtree(store)
    shutil.copytree(tmp_path / "whole", store)
    receiver.sync(SEVEN, EIGHT, TensorTarget(blank))
    assert same(blank, states[7])


def test_a_broken_delta_is_bypassed_by_a_checkpoint(
    published: Store, states: tuple[State, ...], blank: State, same: Same
) -> None:
    store, _ = published
    receiver = Receiver(store)
    receiver.sync(None, WeightVersion(4), TensorTarget(blank))
    (store / "weight_v000005" / SHARD).write_bytes(b"garbage")
    applied = receiver.sync(WeightVersion(4), FIVE, TensorTarget(blank))
    assert applied.from_full
    assert same(blank, states[4])


def test_missing_stores_and_versions_say_what_to_do(published: Store, tmp_path: Path) -> None:
    store, _ = published
    with pytest.raises(ConfigError, match="publish a version there first"):
        Receiver(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="the newest is 8"):
        Receiver(store).plan(None, WeightVersion(9))
    with pytest.raises(Stale):
        Receiver(store).plan(EIGHT, SEVEN)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="the newest is None"):
        Receiver(tmp_path / "empty").plan(None, ONE)


@pytest.mark.parametrize("latest", [b"", b"weight_v7\n", b"../../etc", b"x" * 100, b"\xff\xfe"])
def test_a_torn_latest_is_corrupt(published: Store, latest: bytes) -> None:
    store, _ = published
    (store / "LATEST").write_bytes(latest)
    with pytest.raises(Corrupt, match="LATEST"):
        Receiver(store).latest()


def test_a_late_receiver_follows_a_pruned_store(
    tmp_path: Path, states: tuple[State, ...], blank: State, same: Same
) -> None:
    with Publisher(
        tmp_path, versions=VersionSettings(anchor_every=3, keep_versions=2)
    ) as publisher:
        publisher.publish(states[0])
        receiver = Receiver(tmp_path)
        receiver.sync(None, ONE, TensorTarget(blank))
        for state in states[1:]:
            step = publisher.publish(state)
        applied = receiver.sync(ONE, step.version, TensorTarget(blank))
    assert applied.from_full
    assert same(blank, states[-1])
