"""A staged version is loaded if it still fits, and prepared again if not."""

import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from harvester.contracts.errors import ConfigError, Corrupt, Unsupported
from harvester.contracts.ids import WeightVersion
from tests.unit.weightsync.vllm.plain_model import PlainModel
from tests.unit.weightsync.vllm.test_paced_pool import CountingPace
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Published, Publisher
from weightsync.transport.directory import DirectorySource
from weightsync.transport.location import StoreRoot
from weightsync.vllm.engine_weights import EngineWeights
from weightsync.vllm.prepared_version import RequestedVersion
from weightsync.vllm.stager import StageState

State = dict[str, torch.Tensor]


@pytest.fixture
def model(states: tuple[State, ...]) -> PlainModel:
    return PlainModel(states[0])


@pytest.fixture
def weights(model: PlainModel, published: tuple[Path, list[Published]]) -> Iterator[EngineWeights]:
    """Follows stores beside `published`, which has versions 1 to 8 and is named `store`."""
    made = EngineWeights(model, None, StoreRoot(published[0].parent), packed_ahead_bytes=0)
    yield made
    made.close()


def wanted(version: int, store: str = "store") -> RequestedVersion:
    return RequestedVersion(store=store, version=WeightVersion(version))


def staged(
    weights: EngineWeights, version: int | RequestedVersion, *, polls_max: int | None = None
) -> StageState:
    asked = wanted(version) if isinstance(version, int) else version
    for poll in count(1):
        status = weights.stage(asked)
        if status.state is not StageState.RUNNING or poll == polls_max:
            break
        time.sleep(0.001)
    return status.state


def test_a_staged_version_changes_nothing_until_it_is_loaded(
    weights: EngineWeights, model: PlainModel, states: tuple[State, ...]
) -> None:
    weights.load(wanted(3))
    assert staged(weights, 4) is StageState.READY
    assert model.holds(states[2])
    applied = weights.load(wanted(4))
    assert model.holds(states[3])
    assert not applied.from_full


def test_beside_production_every_piece_of_a_version_asks_and_the_bits_are_the_same(
    weights: EngineWeights, model: PlainModel, states: tuple[State, ...]
) -> None:
    pace = CountingPace()
    weights.paced_by(pace)
    weights.load(wanted(3))
    assert model.holds(states[2])
    loaded = pace.begun
    assert loaded > 0
    assert staged(weights, 4) is StageState.READY
    prepared = pace.begun
    assert prepared > loaded, "decoded and tried in pieces"
    weights.load(wanted(4))
    assert pace.begun > prepared, "and written in pieces"
    assert model.holds(states[3])
    assert pace.begun == pace.ended


def test_the_loader_runs_once_for_all_versions(weights: EngineWeights, model: PlainModel) -> None:
    for version in (2, 4, 7):
        weights.load(wanted(version))
        weights.release()
    assert model.loads == 2, "once with its copies held back, once traced"


def test_a_version_staged_on_another_base_is_prepared_again(
    weights: EngineWeights, model: PlainModel, states: tuple[State, ...]
) -> None:
    weights.load(wanted(2))
    staged(weights, 4)
    weights.load(wanted(3))
    weights.load(wanted(4))
    assert model.holds(states[3])
    assert weights.report()["reapplied"] == 0


def begun_anew(store: Path, state: State) -> str:
    """A new run publishes version 1 to an emptied store; returns its state hash."""
    shutil.rmtree(store)
    with Publisher(store) as publisher:
        return publisher.publish(state).state_hash


@pytest.mark.parametrize("knows", [False, True], ids=["by its number", "by its state hash"])
def test_the_new_run_s_version_takes_the_place_of_a_staged_one_of_its_number(
    weights: EngineWeights,
    model: PlainModel,
    published: tuple[Path, list[Published]],
    states: tuple[State, ...],
    knows: bool,
) -> None:
    store = published[0].parent / "again"
    store.mkdir()
    for first, second in ((states[1], states[2]), (states[3], states[4])):
        old = begun_anew(store, first)
        asked = RequestedVersion(store="again", version=WeightVersion(1))
        assert staged(weights, asked) is StageState.READY
        new = begun_anew(store, second)
        assert old != new
        if knows:
            asked = replace(asked, state_hash=new)
        assert weights.load(asked).state_hash == new
        assert model.holds(second)


def test_a_new_run_s_version_is_staged_before_it_is_ready(
    weights: EngineWeights,
    model: PlainModel,
    published: tuple[Path, list[Published]],
    states: tuple[State, ...],
) -> None:
    assert staged(weights, 1) is StageState.READY
    begun_anew(published[0], states[6])
    assert weights.stage(wanted(1)).state is StageState.RUNNING
    assert staged(weights, 1) is StageState.READY
    weights.load(wanted(1))
    assert model.holds(states[6])


def test_a_file_system_of_unstable_file_numbers_lets_a_version_get_ready(
    weights: EngineWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = count()
    monkeypatch.setattr(DirectorySource, "stamp", lambda *_: f"{next(looks)}")
    assert staged(weights, 4, polls_max=500) is StageState.READY
    assert staged(weights, 4, polls_max=1) is StageState.READY


def test_a_staged_version_outlives_its_files(
    weights: EngineWeights,
    model: PlainModel,
    published: tuple[Path, list[Published]],
    states: tuple[State, ...],
) -> None:
    weights.load(wanted(3))
    assert staged(weights, 4) is StageState.READY
    shutil.rmtree(published[0])
    weights.load(wanted(4))
    assert model.holds(states[3])


def test_a_stage_from_before_the_weights_moved_is_not_used(
    weights: EngineWeights, model: PlainModel, states: tuple[State, ...]
) -> None:
    weights.load(wanted(3))
    staged(weights, 4)
    parameter = model.held["layer_weight"]
    parameter.data = parameter.data.clone()
    applied = weights.load(wanted(4))
    assert applied.from_full
    assert model.holds(states[3])


def test_touched_weights_are_found_while_staging_and_counted(
    weights: EngineWeights, model: PlainModel, states: tuple[State, ...]
) -> None:
    weights.load(wanted(3))
    model.held["layer_weight"].data.view(torch.int16)[0, 0] ^= 1
    assert staged(weights, 4) is StageState.READY
    assert weights.load(wanted(4)).from_full
    assert model.holds(states[3])
    assert weights.report()["reapplied"] == 1


def test_deltas_for_host_memory_are_refused_on_an_accelerator_before_anything_is_touched(
    weights: EngineWeights,
    model: PlainModel,
    published: tuple[Path, list[Published]],
    states: tuple[State, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an accelerator at hand: every tensor claims to lie on one."""
    monkeypatch.setattr("weightsync.vllm.loader_map.HOST", "none")
    settings = VersionSettings(encoding="context")  # type: ignore[arg-type]
    with Publisher(published[0].parent / "slow", versions=settings) as publisher:
        for state in states[:3]:
            publisher.publish(state)
    weights.load(wanted(2, "slow"))
    with pytest.raises(Unsupported, match="publish with encoding=rosemux"):
        weights.load(wanted(3, "slow"))
    assert model.holds(states[1])


def test_another_expected_state_is_refused_before_anything_is_touched(
    weights: EngineWeights, model: PlainModel, states: tuple[State, ...]
) -> None:
    weights.load(wanted(3))
    before = weights.report()
    other = RequestedVersion(store="store", version=WeightVersion(4), state_hash="0" * 32)
    with pytest.raises(Corrupt, match="the version is from another store"):
        weights.load(other)
    assert model.holds(states[2])
    assert weights.report() == before


def test_a_store_of_another_model_is_refused_by_tensor_before_anything_is_touched(
    weights: EngineWeights,
    model: PlainModel,
    states: tuple[State, ...],
    published: tuple[Path, list[Published]],
) -> None:
    with Publisher(published[0].parent / "other") as publisher:
        part = {"layer.weight": states[0]["layer.weight"][:2], "head": torch.ones(1)}
        publisher.publish({**states[0], **part, "moments": torch.ones(1), "z": torch.ones(1)})
    weights.load(wanted(3))
    with pytest.raises(ConfigError, match="another model") as refused:
        weights.load(wanted(1, "other"))
    differing = "head is extra; layer.weight is BF16[2, 30], not BF16[40, 30]; moments is extra"
    assert f": {differing}; 1 more; restart the engine" in str(refused.value)
    assert model.holds(states[2])
    assert weights.is_loaded


def test_an_update_that_fails_half_written_is_neither_a_version_nor_the_first_weights(
    weights: EngineWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert weights.report() == {}

    def torn(*_: object) -> None:
        raise OSError("torn")

    with monkeypatch.context() as patched:
        patched.setattr("weightsync.receiver.Receiver.settle", torn)
        with pytest.raises(OSError, match="torn"):
            weights.load(wanted(3))
    assert weights.report() == {"in_doubt": True}, "the loader's random probe is in the model"
    weights.load(wanted(3))
    assert weights.report()["version"] == 3


def test_after_closing_an_update_begins_anew(
    weights: EngineWeights, model: PlainModel, states: tuple[State, ...]
) -> None:
    weights.load(wanted(3))
    staged(weights, 4)
    weights.close()
    weights.load(wanted(5))
    assert model.holds(states[4])


class Half(PlainModel):
    """One of two ranks: the second half of every tensor with several rows, all of the others."""

    def __init__(self, state: State) -> None:
        super().__init__({name: self.part(tensor) for name, tensor in state.items()})

    @staticmethod
    def part(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.shape[0] // 2 if tensor.dim() > 1 else 0
        return tensor[rows:].contiguous()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name, self.part(tensor)) for name, tensor in weights)

    def holds(self, state: State) -> bool:
        return super().holds({name: self.part(tensor) for name, tensor in state.items()})


def test_a_rank_follows_with_the_rows_that_it_has(
    published: tuple[Path, list[Published]], states: tuple[State, ...]
) -> None:
    rank = Half(states[0])
    root = StoreRoot(published[0].parent)
    weights = EngineWeights(rank, None, root, packed_ahead_bytes=0, sliced=True)
    for version in (2, 3, 7):
        applied = weights.load(wanted(version))
        weights.release()
        assert rank.holds(states[version - 1])
        assert applied.state_hash == published[1][version - 1].state_hash
        assert applied.from_full == (version == 2)
        assert weights.report()["in_place"]
    with Publisher(published[0].parent / "other") as publisher:
        publisher.publish(states[9])
        publisher.publish(states[10])
    for version in (1, 2):
        applied = weights.load(wanted(version, "other"))
        assert applied.from_full == (version == 1)
        assert rank.holds(states[8 + version])
    assert weights.load(wanted(8)).from_full
    assert rank.holds(states[7])
    weights.close()


def test_before_the_weights_leave_what_was_staged_from_them_is_dropped(
    weights: EngineWeights, model: PlainModel, states: tuple[State, ...]
) -> None:
    weights.load(wanted(3))
    assert staged(weights, 4) is StageState.READY
    weights.fall_asleep(1)
    assert weights.stage(wanted(4)).state is StageState.RUNNING, "it is prepared anew"
    weights.load(wanted(4))
    assert model.holds(states[3])


class SinksImpl:
    """Computes from a wider copy of the sinks, as vLLM's FlashInfer does."""

    def __init__(self, sinks: torch.Tensor) -> None:
        self._sinks_source = sinks
        self.sinks = sinks.to(torch.float32)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.sinks.copy_(self._sinks_source)


class SinksModel(torch.nn.Module):
    """Its loader copies, or computes: then vLLM's own loader is used at each update."""

    def __init__(self, *, adds: int) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.zeros(64).bfloat16(), False)
        self.norm = torch.nn.Parameter(torch.zeros(64), False)
        self.attention = torch.nn.Module()
        self.attention.impl = SinksImpl(self.sinks)
        self.adds = adds

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            scaled = name == "norm" and self.adds
            getattr(self, name).data.copy_(tensor + self.adds if scaled else tensor)
        return {"sinks", "norm"}


def steps(root: Path, count: int) -> list[State]:
    """Consecutive versions of `job`, in which the norm stays."""
    found: list[State] = [
        {"sinks": torch.full((64,), 1.0 + step).bfloat16(), "norm": torch.ones(64)}
        for step in range(count)
    ]
    with Publisher(root / "job") as publisher:
        for state in found:
            publisher.publish(state)
    return found


@pytest.mark.parametrize("adds", [0, 1], ids=["in place", "by vLLM's loader"])
def test_attention_computes_from_each_version_s_sinks(tmp_path: Path, adds: int) -> None:
    model = SinksModel(adds=adds)
    weights = EngineWeights(model, None, StoreRoot(tmp_path), packed_ahead_bytes=0)
    with closing(weights):
        for version, state in enumerate(steps(tmp_path, 3), start=1):
            weights.load(wanted(version, "job"))
            assert torch.equal(model.attention.impl.sinks, state["sinks"].float())
        assert weights.report()["in_place"] == (not adds)


def test_sinks_that_were_replaced_by_a_copy_refuse_the_next_version(tmp_path: Path) -> None:
    steps(tmp_path, 2)
    model = SinksModel(adds=0)
    weights = EngineWeights(model, None, StoreRoot(tmp_path), packed_ahead_bytes=0)
    with closing(weights):
        weights.load(wanted(1, "job"))
        model.attention.impl._sinks_source = model.sinks.half()
        with pytest.raises(Unsupported, match="a copy of its attention sinks"):
            weights.load(wanted(2, "job"))
        assert weights.report()["version"] == 1


@pytest.mark.parametrize("adds", [0, 1], ids=["in place", "by vLLM's loader"])
def test_weights_that_a_deep_sleep_dropped_are_loaded_whole(tmp_path: Path, adds: int) -> None:
    states = steps(tmp_path, 2)
    model = SinksModel(adds=adds)
    weights = EngineWeights(model, None, StoreRoot(tmp_path), packed_ahead_bytes=0)
    with closing(weights):
        weights.load(wanted(1, "job"))
        weights.fall_asleep(1)
        assert weights.report()["version"] == 1
        weights.fall_asleep(2)
        assert weights.report() == {"in_doubt": True}
        for parameter in model.parameters():
            parameter.data.zero_()
        assert weights.load(wanted(2, "job")).from_full
        assert torch.equal(model.sinks, states[1]["sinks"])
        assert torch.equal(model.norm, states[1]["norm"] + adds)


def test_a_first_store_of_another_model_leaves_the_weights_that_the_engine_started_with(
    tmp_path: Path,
) -> None:
    with Publisher(tmp_path / "job") as publisher:
        publisher.publish({"norm": torch.zeros(64), "sinks": torch.zeros(65).bfloat16()})
    model = SinksModel(adds=0)
    model.norm.data.fill_(7)
    weights = EngineWeights(model, None, StoreRoot(tmp_path), packed_ahead_bytes=0)
    with closing(weights), pytest.raises(ConfigError, match="does not fit this model"):
        weights.load(wanted(1, "job"))
    assert (model.norm == 7).all()
