"""The Hugging Face index layout that other delta systems read and write, in both directions.

Their files are made here by the official safetensors package and by hand, never by our writer.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
import xxhash
import zstandard

from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.encoding.codec import Encoding
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

State = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


def _states() -> tuple[State, State]:
    torch.manual_seed(0)
    old = {"a": torch.randn(30, 20).bfloat16(), "b": torch.randn(9), "c": torch.ones(4)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"][3] *= 1.01
    new["b"][8] = float("nan")
    return old, new


def _raw(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    raw: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw


def _overwritten(old: torch.Tensor, new: torch.Tensor) -> bytes:
    positions = np.flatnonzero(_raw(old) != _raw(new)).astype("<u4")
    head = np.array([positions.size], dtype="<u4")
    return head.tobytes() + positions.tobytes() + _raw(new)[positions].tobytes()


def _payload(encoding: str, old: torch.Tensor, new: torch.Tensor) -> bytes:
    raw = (_raw(old) ^ _raw(new)).tobytes() if encoding == "xor" else _overwritten(old, new)
    return zstandard.ZstdCompressor().compress(raw)


def _checksum(algorithm: str, tensor: torch.Tensor) -> str:
    raw = _raw(tensor).tobytes()
    if algorithm == "adler32":
        return f"{zlib.adler32(raw):08x}"
    return str(xxhash.xxh3_128(raw).hexdigest())


def _foreign_store(root: Path, encoding: str, algorithm: str) -> None:
    """A full version 1 and a delta version 2, as slime and its kin lay them out."""
    old, new = _states()
    full = root / "weight_v000001"
    full.mkdir()
    safetensors.torch.save_file(old, full / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(old, "model-00001-of-00001.safetensors")
    _write_index(full, {"version": "000001"}, weight_map)
    delta = root / "weight_v000002"
    delta.mkdir()
    changed = [name for name in old if _raw(old[name]).tobytes() != _raw(new[name]).tobytes()]
    payloads = {
        name: torch.frombuffer(
            bytearray(_payload(encoding, old[name], new[name])), dtype=torch.uint8
        )
        for name in changed
    }
    safetensors.torch.save_file(
        payloads,
        delta / "model-00000-of-00001.safetensors",
        metadata={name: _checksum(algorithm, new[name]) for name in changed},
    )
    metadata = {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": algorithm,
    }
    _write_index(delta, metadata, dict.fromkeys(changed, "model-00000-of-00001.safetensors"))
    (root / "LATEST").write_text("weight_v000002\n")


def _write_index(
    directory: Path, metadata: Mapping[str, str], weight_map: Mapping[str, str]
) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def _same(left: State, right: State) -> bool:
    return all((_raw(left[name]) == _raw(right[name])).all() for name in left)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("algorithm", ["xxh3-128", "adler32"])
@pytest.mark.parametrize("start", [None, 1])
def test_a_store_of_another_system_is_read(
    tmp_path: Path, encoding: str, algorithm: str, start: int | None
) -> None:
    _foreign_store(tmp_path, encoding, algorithm)
    old, new = _states()
    held = {name: tensor.clone() for name, tensor in old.items()}
    receiver = Receiver(tmp_path)
    current = None if start is None else WeightVersion(start)
    applied = receiver.sync(current, WeightVersion(2), TensorTarget(held))
    assert applied.version == 2
    assert _same(held, new)


def test_a_wrong_tensor_checksum_of_another_system_is_corrupt(tmp_path: Path) -> None:
    _foreign_store(tmp_path, "xor", "xxh3-128")
    shard = tmp_path / "weight_v000002" / "model-00000-of-00001.safetensors"
    _, new = _states()
    right = _checksum("xxh3-128", new["a"]).encode()
    assert right in shard.read_bytes()
    shard.write_bytes(shard.read_bytes().replace(right, right[::-1]))
    held = {name: torch.zeros_like(tensor) for name, tensor in new.items()}
    with pytest.raises(Corrupt, match="a: not the xxh3-128 checksum"):
        Receiver(tmp_path).sync(None, WeightVersion(2), TensorTarget(held))


def test_our_full_versions_are_checkpoints_for_anyone(tmp_path: Path) -> None:
    old, _ = _states()
    with Publisher(tmp_path) as publisher:
        publisher.publish(old)
    loaded = safetensors.torch.load_file(
        tmp_path / "weight_v000001" / "model-00001-of-00001.safetensors"
    )
    assert loaded.keys() == old.keys()
    assert _same(loaded, old)


@pytest.mark.parametrize("encoding", [Encoding.XOR, Encoding.OVERWRITE])
def test_our_deltas_in_a_shared_encoding_hold_what_its_readers_expect(
    tmp_path: Path, encoding: Encoding
) -> None:
    old, new = _states()
    with Publisher(tmp_path, versions=VersionSettings(encoding=encoding)) as publisher:
        publisher.publish(old)
        publisher.publish(new)
    delta = tmp_path / "weight_v000002"
    index = json.loads((delta / INDEX).read_bytes())
    assert index["metadata"] == {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": str(encoding),
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    assert set(index["weight_map"]) == {"a", "b"}
    for name, shard in index["weight_map"].items():
        with safetensors.safe_open(delta / shard, "np") as file:
            payload = file.get_tensor(name).tobytes()
            assert file.metadata()[name] == _checksum("xxh3-128", new[name])
        raw = zstandard.ZstdDecompressor().decompress(payload)
        if encoding is Encoding.XOR:
            assert raw == (_raw(old[name]) ^ _raw(new[name])).tobytes()
        else:
            assert raw == _overwritten(old[name], new[name])
