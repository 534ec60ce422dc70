"""Stores that slime, miles, stitch and SkyRL wrote themselves, read as they are.

foreign_stores/golden was written by their code (foreign_stores/trainers.py says how).
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch

from harvester.contracts.errors import ConfigError, Corrupt, RoseMuxError, Stale, Unsupported
from harvester.contracts.ids import WeightVersion
from tests.contract.weightsync.foreign_stores.trainers import BASE, GOLDEN, states
from tests.integration.slime_writer import DeltaTrainer, raw
from tests.weight_servers import served
from weightsync import Follower, Publisher, Receiver, TensorTarget
from weightsync.encoding.delta import Delta
from weightsync.publish.settings import VersionSettings
from weightsync.reading.store import Store
from weightsync.receive.checkpoint import Checkpoint

STORES = (
    "slime-xor",
    "slime-overwrite",
    "slime-replicated",
    "miles-xor",
    "miles-overwrite",
    "stitch",
    "skyrl",
)
INDEX = "model.safetensors.index.json"
State = dict[str, torch.Tensor]


def state(version: int) -> State:
    found: State = safetensors.torch.load_file(GOLDEN / f"state-{version}.safetensors")
    return found


def held(version: int) -> State:
    return {name: tensor.clone() for name, tensor in states()[version].items()}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all((raw(left[n]) == raw(right[n])).all() for n in left)


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / name, tmp_path / "store"))


def loaded(directory: Path) -> State:
    found: State = {}
    for shard in sorted(directory.glob("*.safetensors")):
        found |= safetensors.torch.load_file(shard)
    return found


def parsed(path: Path) -> object:
    """A file's content; safetensors writes the checksums of a header in any order."""
    data = path.read_bytes()
    if path.suffix == ".json":
        return json.loads(data)
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


@pytest.mark.parametrize("name", STORES)
def test_a_new_holder_takes_any_version_of_another_trainer_s_store(name: str) -> None:
    receiver = Receiver(GOLDEN / name, base_checkpoint=BASE)
    assert receiver.latest() == 3
    for version in (1, 2, 3):
        current = {n: torch.zeros_like(t) for n, t in held(0).items()}
        applied = receiver.sync(None, WeightVersion(version), TensorTarget(current))
        assert applied.from_full
        assert same(current, state(version))
    receiver.close()


@pytest.mark.parametrize("name", STORES)
def test_a_holder_follows_version_after_version_by_deltas(name: str) -> None:
    receiver = Receiver(GOLDEN / name, base_checkpoint=BASE)
    current, version = held(0), None
    for target in (1, 2, 3):
        applied = receiver.sync(version, WeightVersion(target), TensorTarget(current))
        assert applied.from_full == (version is None)
        assert same(current, state(target))
        version = applied.version
    receiver.close()


@pytest.mark.parametrize("name", STORES)
def test_a_checkpoint_directory_follows_another_trainer_s_store(name: str, tmp_path: Path) -> None:
    receiver = Receiver(GOLDEN / name, base_checkpoint=BASE)
    with Follower(receiver, tmp_path / "policy") as follower:
        for version in (1, 3):
            assert follower.pull(WeightVersion(version)).version == version
            assert same(loaded(tmp_path / "policy"), state(version))
        assert follower.newer(wait_s=0.0) is None
    receiver.close()


def test_the_trainer_of_the_engine_tests_writes_what_slime_and_miles_write(tmp_path: Path) -> None:
    for name, encoding, checksum in (
        ("slime-xor", "xor", "xxh3-128"),
        ("slime-overwrite", "overwrite", "blake3"),
        ("miles-overwrite", "overwrite", "adler32"),
    ):
        written = tmp_path / name
        trainer = DeltaTrainer(written, BASE, encoding=encoding, checksum=checksum, ranks=2)
        for new in states()[1:]:
            trainer.update(new)
        theirs = {p.relative_to(GOLDEN / name): p for p in (GOLDEN / name).rglob("*.*")}
        assert {p.relative_to(written) for p in written.rglob("*.*")} == theirs.keys()
        for path, golden in theirs.items():
            assert parsed(written / path) == parsed(golden), path


def test_a_version_appears_when_its_index_does(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    receiver = Receiver(store, base_checkpoint=BASE)
    assert receiver.latest() is None
    for version in (1, 2, 3):
        directory = f"weight_v{version:06d}"
        theirs = GOLDEN / "slime-xor" / directory
        (store / directory).mkdir()
        for shard in theirs.glob("*.safetensors"):
            shutil.copy(shard, store / directory / f"{shard.name}.tmp")
            assert receiver.latest() == (version - 1 or None)
            (store / directory / f"{shard.name}.tmp").rename(store / directory / shard.name)
        assert receiver.latest() == (version - 1 or None)
        assert receiver.newer(WeightVersion(version - 1) if version > 1 else None, wait_s=0) is None
        shutil.copy(theirs / INDEX, store / directory / INDEX)
        assert receiver.latest() == version
    receiver.close()


@pytest.mark.parametrize("name", ["miles-xor", "stitch", "skyrl"])
def test_an_object_store_and_a_server_give_the_same(name: str, tmp_path: Path) -> None:
    objects = fsspec.filesystem("memory")
    objects.put(str(GOLDEN / name), f"/foreign/{name}", recursive=True)
    with served(GOLDEN, base_checkpoint=BASE) as url:
        for at, base in ((f"memory://foreign/{name}", BASE), (f"{url}/stores/{name}", None)):
            receiver = Receiver(at, base_checkpoint=base, spool_dir=tmp_path)
            assert receiver.latest() == 3
            current, version = held(0), None
            for target in (1, 3):
                applied = receiver.sync(version, WeightVersion(target), TensorTarget(current))
                version = applied.version
                assert same(current, state(target))
            receiver.close()
    objects.rm("/foreign", recursive=True)


def test_stitch_s_pointer_says_which_version_is_in_force(tmp_path: Path) -> None:
    store = copied("stitch", tmp_path)
    receiver = Receiver(store, base_checkpoint=BASE)
    (store / "latest").write_text("run/weight_v000002")
    assert receiver.latest() == 2
    (store / "latest").write_text("run/weight_v000000")
    assert receiver.latest() is None
    (store / "latest").write_text("../../etc/passwd")
    with pytest.raises(Corrupt, match=r"latest holds .* expected RUN/weight_v000007"):
        receiver.latest()
    (store / "latest").rename(tmp_path / "secret")
    (store / "latest").symlink_to(tmp_path / "secret")
    with pytest.raises(Corrupt, match="latest is a link out of the store"):
        receiver.latest()
    receiver.close()


def test_a_trainer_that_begins_anew_in_its_directory_is_taken_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    """The other run's deltas have the same names and sizes; one tensor moved in its first alone."""
    store = tmp_path / "store"
    first = DeltaTrainer(store, BASE, encoding="xor", checksum="xxh3-128")
    other = {name: tensor.clone() for name, tensor in held(1).items()}
    other["layer.scale"] *= 3.0
    for new in (held(1), held(2)):
        first.update(new)
    receiver = Receiver(store, base_checkpoint=BASE)
    current = held(0)
    assert receiver.sync(None, WeightVersion(2), TensorTarget(current)).version == 2
    again = DeltaTrainer(store, BASE, encoding="xor", checksum="xxh3-128")
    assert receiver.latest() is None
    third = {name: tensor.clone() for name, tensor in other.items()}
    third["norm"][0] = 5.0
    again.update(other)
    back = held(2)
    assert receiver.sync(WeightVersion(2), WeightVersion(1), TensorTarget(back)).from_full
    assert same(back, other)
    for new in (other, third):
        again.update(new)
    applied = receiver.sync(WeightVersion(2), WeightVersion(3), TensorTarget(current))
    assert applied.from_full
    assert same(current, third)
    receiver.close()


def test_a_staged_version_that_is_never_written_says_nothing_of_the_held_one_s_run(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    first = DeltaTrainer(store, BASE, encoding="xor", checksum="xxh3-128")
    for new in (held(1), held(2)):
        first.update(new)
    with closing(Receiver(store, base_checkpoint=BASE)) as receiver:
        current = held(0)
        receiver.sync(None, WeightVersion(2), TensorTarget(current))
        again = DeltaTrainer(store, BASE, encoding="xor", checksum="xxh3-128")
        other = {name: tensor.clone() for name, tensor in held(1).items()}
        other["layer.scale"] *= 3.0
        third = {name: tensor.clone() for name, tensor in other.items()}
        third["norm"][0] = 5.0
        for new in (other, other, third):
            again.update(new)
        assert receiver.prepare(WeightVersion(2), WeightVersion(3)).full is not None
        fourth = {name: tensor.clone() for name, tensor in third.items()}
        fourth["norm"][1] = 6.0
        again.update(fourth)
        assert receiver.sync(WeightVersion(2), WeightVersion(4), TensorTarget(current)).from_full
        assert same(current, fourth)


def test_a_follower_that_ended_amid_an_update_finishes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Served over HTTP, where nothing tells runs apart."""
    with served(GOLDEN, base_checkpoint=BASE) as url:
        at, policy = f"{url}/stores/slime-xor", tmp_path / "policy"
        with closing(Receiver(at)) as receiver, Follower(receiver, policy) as follower:
            follower.pull(WeightVersion(2))
            change, changed = Checkpoint.change, 0

            def ended(self: Checkpoint, name: str, deltas: Sequence[Delta]) -> None:
                nonlocal changed
                changed += 1
                if changed == 2:
                    raise SystemExit
                change(self, name, deltas)

            monkeypatch.setattr(Checkpoint, "change", ended)
            with pytest.raises(SystemExit):
                follower.pull(WeightVersion(3))
            monkeypatch.setattr(Checkpoint, "change", change)
        with closing(Receiver(at)) as receiver, Follower(receiver, policy) as follower:
            assert follower.pull(WeightVersion(3)).version == 3
        assert same(loaded(policy), state(3))


def test_an_upload_s_stray_file_hides_no_store(tmp_path: Path) -> None:
    store = copied("slime-xor", tmp_path)
    (store / ".tmp-upload").mkdir()
    with closing(Receiver(store, base_checkpoint=BASE)) as receiver:
        assert receiver.latest() == 3


def test_deltas_without_the_checkpoint_that_they_build_on_ask_for_it() -> None:
    receiver = Receiver(GOLDEN / "slime-xor")
    with pytest.raises(ConfigError, match="version 3 builds on version 0, the checkpoint"):
        receiver.prepare(None, WeightVersion(3))
    receiver.close()


def test_another_checkpoint_is_found_by_the_tensors_checksums(tmp_path: Path) -> None:
    other = {name: tensor.flip(0) for name, tensor in held(0).items()}
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(other, tmp_path / "hf" / "model.safetensors")
    receiver = Receiver(GOLDEN / "miles-xor", base_checkpoint=tmp_path / "hf")
    with pytest.raises(Corrupt, match=r"not the blake3 checksum .* base checkpoint is not the one"):
        receiver.prepare(None, WeightVersion(3))
    receiver.close()


def test_the_checkpoint_s_own_index_names_its_shards(tmp_path: Path) -> None:
    base = Path(shutil.copytree(BASE, tmp_path / "hf"))
    weight_map = {
        name: shard.name
        for shard in base.glob("*.safetensors")
        for name in safetensors.torch.load_file(shard)
    }
    (base / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    safetensors.torch.save_file(held(0), base / "consolidated.safetensors")
    receiver = Receiver(GOLDEN / "slime-xor", base_checkpoint=base)
    current = held(0)
    receiver.sync(None, WeightVersion(3), TensorTarget(current))
    assert same(current, state(3))
    receiver.close()


def test_our_publisher_leaves_another_trainer_s_store_alone(tmp_path: Path) -> None:
    store = copied("slime-xor", tmp_path)
    with pytest.raises(ConfigError, match="is written by slime or miles"):
        Publisher(store)
    assert sorted(path.name for path in store.iterdir()) == [
        f"weight_v{version:06d}" for version in (1, 2, 3)
    ]


def test_a_store_of_ours_is_never_taken_for_another_s(tmp_path: Path) -> None:
    with Publisher(tmp_path, versions=VersionSettings(encoding="xor")) as publisher:
        publisher.publish(held(0))
        publisher.publish(held(1))
    (tmp_path / "updates").mkdir()
    (tmp_path / "latest").write_text("run/weight_v000009")
    (tmp_path / "delta-00000001").mkdir()
    (tmp_path / "LATEST").rename(tmp_path / "kept")
    assert Store(tmp_path, base_checkpoint=BASE).writer is None
    (tmp_path / "kept").rename(tmp_path / "LATEST")
    assert Store(tmp_path, base_checkpoint=BASE).latest() == 2


Damage = Callable[[Path], object]


def _shard(store: Path) -> Path:
    return store / "weight_v000003" / "model-00000-of-00001.safetensors"


def _edited(store: Path, old: str, new: str) -> None:
    index = store / "weight_v000003" / INDEX
    assert old in index.read_text()
    index.write_text(index.read_text().replace(old, new))


def _flipped(store: Path) -> None:
    data = bytearray(_shard(store).read_bytes())
    data[-12] ^= 1
    _shard(store).write_bytes(data)


def _linked(store: Path) -> None:
    outside = store.parent / "outside.safetensors"
    _shard(store).rename(outside)
    _shard(store).symlink_to(outside)


def _linked_version(store: Path) -> None:
    (store / "weight_v000003").rename(store.parent / "outside")
    (store / "weight_v000003").symlink_to(store.parent / "outside")


def _wrong_checksum(store: Path) -> None:
    data = _shard(store).read_bytes()
    at = data.index(b'"norm":"') + 8
    _shard(store).write_bytes(data[:at] + bytes(reversed(data[at : at + 32])) + data[at + 32 :])


def _without_checksums(store: Path) -> None:
    tensors = safetensors.torch.load_file(_shard(store))
    safetensors.torch.save_file(tensors, _shard(store))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "cut shard": (lambda s: os.truncate(_shard(s), 100), "header|file of 100|bytes"),
    "cut index": (lambda s: os.truncate(s / "weight_v000003" / INDEX, 60), "index of version 3"),
    "flipped byte": (_flipped, "zstd|checksum"),
    "wrong checksum": (_wrong_checksum, "norm: not the xxh3-128 checksum"),
    "no checksums": (_without_checksums, "has no checksum of layer.weight"),
    "missing shard": (lambda s: _shard(s).unlink(), "weight_v000003 has no model-00000-of-00001"),
    "10 GB header": (
        lambda s: _shard(s).write_bytes((10 << 30).to_bytes(8, "little") + b"{}"),
        "header of 10737418240 bytes",
    ),
    "shard with a path": (
        lambda s: _edited(s, "model-00000-of-00001", "../weight_v000001/model-00000-of-00002"),
        "shard '../weight_v000001",
    ),
    "unknown encoding": (lambda s: _edited(s, '"xor"', '"zip"'), "delta_encoding 'zip'"),
    "unknown checksum": (lambda s: _edited(s, "xxh3-128", "crc"), "checksum_format 'crc'"),
    "unknown tensor": (lambda s: _edited(s, '"norm"', '"norn"'), "name different tensors"),
    "renamed directory": (
        lambda s: (s / "weight_v000003").rename(s / "weight_v000004"),
        "index of version 4 has version 3",
    ),
    "missing version": (
        lambda s: shutil.rmtree(s / "weight_v000002"),
        "version 3 builds on version 2, which is not in the store",
    ),
    "version without an index": (
        lambda s: (s / "weight_v000002" / INDEX).unlink(),
        "weight_v000002 is gone or was never finished",
    ),
    "link out of the store": (_linked, "is a link out of the store"),
    "directory linked out of the store": (_linked_version, "is a link out of the store"),
    "circle of links": (
        lambda s: (_shard(s).unlink(), _shard(s).symlink_to(_shard(s).name)),
        "is a link out of the store",
    ),
    "pipe": (lambda s: (_shard(s).unlink(), os.mkfifo(_shard(s))), "no plain file|bytes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_damaged_version_is_refused_in_words_and_the_held_one_stays(
    damage: str, fresh: bool, tmp_path: Path
) -> None:
    store = copied("slime-xor", tmp_path)
    receiver = Receiver(store, base_checkpoint=BASE)
    with Follower(receiver, tmp_path / "policy") as follower:
        follower.pull(WeightVersion(1))
        if not fresh:
            follower.pull(WeightVersion(2))
        before = follower.held
        assert before is not None
        breaking, words = DAMAGES[damage]
        breaking(store)
        if damage in {"missing version", "version without an index"} and not fresh:
            # Only version 3 is needed of a holder of version 2.
            assert follower.pull().version == 3
            return
        with pytest.raises(RoseMuxError, match=words) as refusal:
            follower.pull()
        assert isinstance(refusal.value, Corrupt | Stale | Unsupported)
        assert follower.held == before
        assert same(loaded(tmp_path / "policy"), state(before.version))
        shutil.rmtree(store)
        shutil.copytree(GOLDEN / "slime-xor", store)
        follower.pull()
        assert same(loaded(tmp_path / "policy"), state(3))
    receiver.close()


def test_two_systems_in_one_directory_are_refused(tmp_path: Path) -> None:
    store = copied("slime-xor", tmp_path)
    shutil.copytree(GOLDEN / "skyrl" / "delta-00000001", store / "delta-00000001")
    with pytest.raises(ConfigError, match="versions of SkyRL and slime or miles"):
        Receiver(store, base_checkpoint=BASE).latest()


def test_full_checkpoints_that_nothing_marks_as_complete_are_refused(tmp_path: Path) -> None:
    version = tmp_path / "weight_v000001"
    shutil.copytree(BASE, version)
    (version / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": {}}))
    with pytest.raises(Unsupported, match="metadata has no `version`"):
        Receiver(tmp_path).latest()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("org/model", "no such directory"),
        ("empty", "no safetensors"),
        ("broken", "a header of"),
    ],
)
def test_a_base_checkpoint_that_is_none_is_refused(given: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match=words):
        Receiver(GOLDEN / "slime-xor", base_checkpoint=tmp_path / given).prepare(
            None, WeightVersion(1)
        )


def test_a_tensor_of_two_ranks_that_differ_is_refused(tmp_path: Path) -> None:
    store = copied("slime-replicated", tmp_path)
    first, second = sorted((store / "weight_v000001").glob("*.safetensors"))
    shards = {path: path.read_bytes() for path in (first, second)}
    index = json.loads((store / "weight_v000001" / INDEX).read_text())
    other = first if index["weight_map"]["embed"] == second.name else second
    data = shards[other]
    at = data.index(b'"embed":"') + 9
    other.write_bytes(data[:at] + bytes(reversed(data[at : at + 32])) + data[at + 32 :])
    receiver = Receiver(store, base_checkpoint=BASE)
    with pytest.raises(Corrupt, match="two shards have embed, and they differ"):
        receiver.prepare(None, WeightVersion(1))
    receiver.close()


@pytest.mark.parametrize("damage", [_flipped, _wrong_checksum, _without_checksums])
def test_a_damaged_delta_is_found_before_the_holder_s_first_byte_changes(
    damage: Damage, tmp_path: Path
) -> None:
    store = copied("slime-xor", tmp_path)
    receiver = Receiver(store, base_checkpoint=BASE)
    current = held(0)
    receiver.sync(None, WeightVersion(2), TensorTarget(current))
    damage(store)
    with pytest.raises(Corrupt):
        receiver.sync(WeightVersion(2), WeightVersion(3), TensorTarget(current))
    assert same(current, state(2))
    receiver.close()
