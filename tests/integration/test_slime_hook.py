"""slime's disk deltas through its own hook: read as they are, and in force behind a gateway."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from examples import slime_hook
from harvester.contracts.ids import WeightVersion
from tests.contract.weightsync import test_shared_layout as layout
from tests.integration.conftest import Served
from weightsync import Receiver, TensorTarget

SHARD = "model-00001-of-00001.safetensors"
DELTA = "model-00000-of-00001.safetensors"
State = dict[str, torch.Tensor]


def delta(root: Path, version: int, old: State, new: State, encoding: str) -> Path:
    """A version as slime's UpdateWeightFromDiskDelta writes it, the first on version 0."""
    directory = root / f"weight_v{version:06d}"
    directory.mkdir()
    raw = {name: layout._raw(new[name]) for name in new}
    changed = [name for name in new if (layout._raw(old[name]) != raw[name]).any()]
    payloads = {
        name: torch.frombuffer(
            bytearray(layout._payload(encoding, old[name], new[name])), dtype=torch.uint8
        )
        for name in changed
    }
    checksums = {name: layout._checksum("xxh3-128", new[name]) for name in changed}
    safetensors.torch.save_file(payloads, directory / DELTA, metadata=checksums)
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    layout._write_index(directory, metadata, dict.fromkeys(changed, DELTA))
    return directory


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_trainer_s_deltas_are_versions_of_the_job(
    encoding: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_engine: Callable[..., Served],
    gateway: Callable[..., Served],
) -> None:
    front = gateway(fake_engine())
    monkeypatch.setenv("ROSEMUX_GATEWAY", front.url)
    first, second = layout._states()
    third = {name: tensor.clone() for name, tensor in second.items()}
    third["c"][1] = 7.0
    checkpoint, store = tmp_path / "hf", tmp_path / "job"
    checkpoint.mkdir()
    store.mkdir()
    safetensors.torch.save_file(first, checkpoint / SHARD)
    layout._write_index(checkpoint, {"total_size": "1"}, dict.fromkeys(first, SHARD))
    given = SimpleNamespace(update_weight_disk_dir=str(store), hf_checkpoint=str(checkpoint))

    slime_hook.publish(given, str(store), [])
    for version, (old, new) in enumerate(((first, second), (second, third)), start=1):
        written = delta(store, version, old, new, encoding)
        for _rank in range(2):
            slime_hook.publish(given, str(written), [])
        receiver = Receiver(store)
        assert receiver.latest() == version
        for held, current in ((old, WeightVersion(version - 1)), (first, None)):
            target = {name: tensor.clone() for name, tensor in held.items()}
            receiver.sync(current, WeightVersion(version), TensorTarget(target))
            assert layout._same(target, new)
        receiver.close()

    with slime_hook.RolloutClient(front.url, "job") as client:
        choice = client.generate([1, 2], {"max_tokens": 2}, weight_version=2)
    assert {span.version for span in choice.spans} == {2}
