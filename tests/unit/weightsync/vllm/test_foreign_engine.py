"""An engine, whole or a rank of two, that follows the store of another system's trainer."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from tests.integration.slime_writer import DeltaTrainer
from weightsync.elements.bits import spec_of
from weightsync.receiver import Receiver
from weightsync.transport.directory import DirectorySource
from weightsync.transport.location import StoreRoot
from weightsync.vllm.engine_weights import EngineWeights
from weightsync.vllm.in_place import tried_on_copies
from weightsync.vllm.loader_map import traced
from weightsync.vllm.prepared_version import RequestedVersion
from weightsync.vllm.stager import StageState, StageStatus

State = dict[str, torch.Tensor]


def state(version: int) -> State:
    torch.manual_seed(5)
    made = {"weight": torch.randn(8, 6).bfloat16(), "norm": torch.ones(5), "step": torch.tensor(0)}
    made["weight"][version] += 1
    made["norm"][0] += version
    return made


class Model(torch.nn.Module):
    """Has the whole weight, or the middle of it."""

    def __init__(self, rows: slice) -> None:
        super().__init__()
        self.rows = rows
        for name, tensor in self.part(state(0)).items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor), False))

    def part(self, of: State) -> State:
        return {**of, "weight": of["weight"][self.rows]}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor[self.rows] if name == "weight" else tensor)

    def holds(self, of: State) -> bool:
        return all(torch.equal(getattr(self, name), t) for name, t in self.part(of).items())


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """`hf`, a checkpoint, and `job`, four deltas on it."""
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(state(0), tmp_path / "hf" / "model.safetensors")
    trainer = DeltaTrainer(tmp_path / "job", tmp_path / "hf", encoding="xor", checksum="adler32")
    for version in range(1, 5):
        trainer.update(state(version))
    return tmp_path


@pytest.fixture(params=["whole", "rank"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(slice(2, 5) if request.param == "rank" else slice(None))


@pytest.fixture
def weights(job: Path, model: Model) -> Iterator[EngineWeights]:
    made = EngineWeights(
        model,
        None,
        StoreRoot(job, base_checkpoint=job / "hf"),
        packed_ahead_bytes=0,
        sliced=model.rows != slice(None),
    )
    with closing(made):
        yield made


def wanted(version: int) -> RequestedVersion:
    return RequestedVersion(store="job", version=WeightVersion(version))


def staged(weights: EngineWeights, version: int) -> StageStatus:
    while (status := weights.stage(wanted(version))).state is StageState.RUNNING:
        pass
    return status


def test_an_engine_reads_the_base_checkpoint_once(
    weights: EngineWeights, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    read_range = DirectorySource.read_range

    def counted(self: DirectorySource, path: str, start: int, into: memoryview) -> None:
        read.append(path.partition("/")[0])
        read_range(self, path, start, into)

    monkeypatch.setattr(DirectorySource, "read_range", counted)
    for version in (1, 2, 4):
        assert staged(weights, version).state is StageState.READY
        weights.load(wanted(version))
        weights.release()
        assert model.holds(state(version))
        assert ("model.safetensors" in read) == (version == 1)
        assert ("weight_v000001" in read) == (version == 1)
        read.clear()
    assert weights.report()["reapplied"] == 0


def test_refusals_of_a_damaged_delta_count_as_no_repair(
    job: Path, weights: EngineWeights, model: Model
) -> None:
    """Whatever is asked again: only a version that replaced another state was applied again."""
    weights.load(wanted(2))
    shard = next((job / "job" / "weight_v000003").glob("*.safetensors"))
    good = shard.read_bytes()
    shard.write_bytes(good[:-12] + bytes([good[-12] ^ 1]) + good[-11:])
    for _ in range(3):
        assert staged(weights, 3).state is StageState.FAILED
    with pytest.raises(Corrupt):
        weights.load(wanted(3))
    assert model.holds(state(2))
    assert weights.report()["version"] == 2
    assert weights.report()["reapplied"] == 0
    shard.write_bytes(good)
    weights.load(wanted(3))
    assert model.holds(state(3))


def test_packed_forms_are_made_of_copies_that_have_the_published_checksums(
    job: Path, pool: ThreadPoolExecutor
) -> None:
    model = Model(slice(None))
    target = traced(model, {name: spec_of(t) for name, t in state(0).items()}, lambda _: None)
    packed: list[Any] = []
    with closing(Receiver(job / "job", base_checkpoint=job / "hf")) as receiver:
        receiver.sync(None, WeightVersion(2), target)
        chain = receiver.prepare(WeightVersion(2), WeightVersion(3), held=target.layout())
    model.weight.data[7, 0] += 1

    def pack(layer: Any, weight: torch.Tensor) -> Any:
        packed.append(weight)
        return lambda *_: None

    layers = {model.weight.untyped_storage().data_ptr(): [model]}
    with pytest.raises(Corrupt, match="weight: not the adler32 checksum"):
        tried_on_copies(target, chain, layers, pack, pool, budget_bytes=1 << 30)
    assert packed == []
