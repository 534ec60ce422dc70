"""Holders of other trainers' stores: ranks that have a part, and what each update reads."""

import json
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import xxhash
import zstandard

from harvester.contracts.errors import Corrupt, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from tests.integration.slime_writer import DeltaTrainer, raw
from weightsync import Publisher, Receiver, TensorTarget
from weightsync.receive.held_parts import TensorParallel
from weightsync.transport.directory import DirectorySource

INDEX = "model.safetensors.index.json"
VERSIONS = 9
State = dict[str, torch.Tensor]


def state(version: int) -> State:
    """One tensor moves in every version, one in the first alone, one never."""
    torch.manual_seed(3)
    made = {"w": torch.randn(8, 6).bfloat16(), "once": torch.randn(4, 2), "norm": torch.ones(5)}
    made["w"][version % 8] += version
    made["once"][0] += version > 0
    return made


def half(rank: int, of: State) -> State:
    return {n: t.chunk(2)[rank].clone() if t.dim() > 1 else t.clone() for n, t in of.items()}


def rank_of(rank: int) -> TensorParallel:
    return TensorParallel(rank=rank, ranks=2, dim_of=lambda name: None if name == "norm" else 0)


def same(left: State, right: State) -> bool:
    return all((raw(left[name]) == raw(right[name])).all() for name in left)


@pytest.fixture(params=["xor", "overwrite"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """`hf`, a checkpoint, and `job`, nine deltas on it."""
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(state(0), tmp_path / "hf" / "model.safetensors")
    write(tmp_path, encoding=request.param)
    return tmp_path


def write(at: Path, *, encoding: str = "xor", of: Callable[[int], State] = state) -> None:
    trainer = DeltaTrainer(at / "job", at / "hf", encoding=encoding, checksum="xxh3-128")
    for version in range(1, VERSIONS + 1):
        trainer.update(of(version))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of which bytes were read, in order."""
    paths: list[str] = []
    for name in ("read_small", "read_range"):

        def counted(
            self: DirectorySource,
            path: str,
            *rest: object,
            call: object = getattr(DirectorySource, name),
        ) -> object:
            paths.append(path)
            return call(self, path, *rest)  # type: ignore[operator]

        monkeypatch.setattr(DirectorySource, name, counted)
    return paths


def test_a_follower_of_a_long_chain_reads_what_is_new(
    job: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many versions lie before the held one, more than are remembered included."""
    monkeypatch.setattr("weightsync.receive.known_steps.MAX_REMEMBERED_STEPS", 3)
    monkeypatch.setattr("weightsync.receive.plan.MAX_CHAIN", 7)
    with closing(Receiver(job / "job", base_checkpoint=job / "hf")) as receiver:
        current = state(0)
        receiver.sync(None, WeightVersion(6), TensorTarget(current))
        for version in range(7, VERSIONS + 1):
            read.clear()
            held, target = WeightVersion(version - 1), WeightVersion(version)
            assert not receiver.sync(held, target, TensorTarget(current)).from_full
            assert directories(read) == {
                f"weight_v{number:06d}" for number in (version - 1, version)
            }
            assert same(current, state(version))


def directories(paths: Iterable[str]) -> set[str]:
    return {path.partition("/")[0] for path in paths}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_base_and_chain_once(
    job: Path, read: list[str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And follows a chain that is longer than one from the base may be."""
    monkeypatch.setattr("weightsync.receive.plan.MAX_CHAIN", 4)
    receiver = Receiver(
        job / "job", base_checkpoint=job / "hf", selection=rank_of(rank), spool_dir=job
    )
    with closing(receiver):
        current, held = half(rank, state(0)), None
        for version in range(1, VERSIONS + 1):
            read.clear()
            target = WeightVersion(version)
            held = receiver.sync(held, target, TensorTarget(current)).version
            assert same(current, half(rank, state(version)))
            assert ("model.safetensors" in read) == (version == 1)
            shards = (path for path in read if path.endswith("0001.safetensors"))
            assert directories(shards) == {f"weight_v{version:06d}"}


def test_a_rank_whose_copy_a_damaged_delta_spoiled_begins_at_the_base(job: Path) -> None:
    shard = next((job / "job" / "weight_v000003").glob("*.safetensors"))
    good = shard.read_bytes()
    receiver = Receiver(job / "job", base_checkpoint=job / "hf", selection=rank_of(0))
    with closing(receiver):
        current = half(0, state(0))
        receiver.sync(None, WeightVersion(2), TensorTarget(current))
        shard.write_bytes(good[:-12] + bytes([good[-12] ^ 1]) + good[-11:])
        with pytest.raises(Corrupt):
            receiver.sync(WeightVersion(2), WeightVersion(3), TensorTarget(current))
        assert same(current, half(0, state(2)))
        shard.write_bytes(good)
        receiver.sync(WeightVersion(2), WeightVersion(3), TensorTarget(current))
        assert same(current, half(0, state(3)))


def test_a_rank_s_copy_of_another_run_is_dropped(job: Path) -> None:
    def other(version: int) -> State:
        return {**state(version), "once": torch.full((4, 2), 7.0 if version else 1.0)}

    receiver = Receiver(job / "job", base_checkpoint=job / "hf", selection=rank_of(1))
    with closing(receiver):
        current = half(1, state(0))
        receiver.sync(None, WeightVersion(2), TensorTarget(current))
        write(job, of=other)
        receiver.sync(WeightVersion(2), WeightVersion(3), TensorTarget(current))
        assert same(current, half(1, other(3)))


def test_a_staged_version_that_a_later_one_took_the_copy_of_is_never_written(job: Path) -> None:
    receiver = Receiver(job / "job", base_checkpoint=job / "hf", selection=rank_of(0))
    with closing(receiver):
        current = half(0, state(0))
        first = receiver.prepare(None, WeightVersion(1))
        second = receiver.prepare(None, WeightVersion(2))
        with pytest.raises(Stale, match="prepare it again"):
            receiver.apply(first, TensorTarget(current))
        assert same(current, half(0, state(0)))
        receiver.apply(second, TensorTarget(current))
        assert same(current, half(0, state(2)))


@pytest.mark.parametrize("rank", [0, None], ids=["a rank", "whole"])
@pytest.mark.parametrize("is_held", [True, False])
def test_versions_without_a_block_in_a_store_of_ours_are_read(
    rank: int | None, is_held: bool, tmp_path: Path
) -> None:
    """As the protocol says; a rank takes them from a full checkpoint."""
    store = tmp_path / "store"
    with Publisher(store) as publisher:
        publisher.publish(state(1))
    write_plain(store, 2)
    write_plain(store, 3)
    with Publisher(store) as publisher:
        assert publisher.publish(state(4)).version == 4
    selection = None if rank is None else rank_of(rank)
    with closing(Receiver(store, selection=selection)) as receiver:
        current = state(0) if rank is None else half(rank, state(0))
        held = None
        for version in (1, 2, 3, 4) if is_held else (3, 4):
            target = WeightVersion(version)
            held = receiver.sync(held, target, TensorTarget(current)).version
            expected = state(version) if rank is None else half(rank, state(version))
            assert same(current, expected)
        assert receiver.reapplied == 0


def write_plain(store: Path, version: int) -> None:
    """A delta as the shared layout has it, with LATEST."""
    directory = store / f"weight_v{version:06d}"
    directory.mkdir()
    old, new = state(version - 1), state(version)
    payloads = {
        name: np.frombuffer(zstandard.compress((raw(old[name]) ^ raw(new[name])).tobytes()), "u1")
        for name in new
    }
    sums = {name: xxhash.xxh3_128_hexdigest(raw(new[name]).data) for name in new}
    (directory / "m.safetensors").write_bytes(safetensors.numpy.save(payloads, metadata=sums))
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    index = {"metadata": metadata, "weight_map": dict.fromkeys(new, "m.safetensors")}
    (directory / INDEX).write_text(json.dumps(index))
    (store / "LATEST").write_text(directory.name)


def _two_shards(hf: Path) -> None:
    whole = state(0)
    (hf / "model.safetensors").unlink()
    safetensors.torch.save_file({"w": whole["w"], "once": whole["once"]}, hf / "a.safetensors")
    safetensors.torch.save_file({"w": -whole["w"], "norm": whole["norm"]}, hf / "b.safetensors")


def _two_shards_and_an_index(hf: Path) -> None:
    _two_shards(hf)
    weight_map = {"w": "a.safetensors", "once": "a.safetensors", "norm": "b.safetensors"}
    (hf / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _two_names(hf: Path) -> None:
    """Gives one header two names, each with its own bytes."""
    data = (hf / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    at = len(data) - end
    entry = f'"norm":{{"dtype":"F32","shape":[5],"data_offsets":[{at},{at + 20}]}}'
    header = data[8:end].rstrip()[:-1] + b"," + entry.encode() + b"}"
    rest = data[end:] + bytes(20)
    (hf / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + rest)


@pytest.mark.parametrize(
    ("double", "words"),
    [
        (_two_shards, "w is in a.safetensors and in b.safetensors"),
        (_two_shards_and_an_index, "w is in a.safetensors and in b.safetensors"),
        (_two_names, "'norm' is named twice"),
    ],
)
def test_a_base_checkpoint_with_a_tensor_twice_is_refused_by_name(
    double: Callable[[Path], None], words: str, job: Path
) -> None:
    double(job / "hf")
    with (
        closing(Receiver(job / "job", base_checkpoint=job / "hf")) as receiver,
        pytest.raises(RoseMuxError, match=words),
    ):
        receiver.prepare(None, WeightVersion(1))
