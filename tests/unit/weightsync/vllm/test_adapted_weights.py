"""An adapter is in force on the very base that it was trained on, or not at all."""

import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harvester.contracts.errors import ConfigError, Corrupt, PeerProtocolError, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from tests.unit.weightsync.vllm.plain_model import PlainModel
from weightsync.layout.adapter import Adapter, Base
from weightsync.publisher import Published, Publisher
from weightsync.receive.rank_sums import SumVerdict
from weightsync.transport.directory import DirectorySource
from weightsync.transport.location import StoreRoot
from weightsync.vllm.adapted_weights import AdaptedWeights
from weightsync.vllm.adapter_stores import AdapterStores
from weightsync.vllm.engine_weights import EngineWeights
from weightsync.vllm.prepared_version import RequestedVersion
from weightsync.vllm.stager import StageState

State = dict[str, torch.Tensor]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["layer"]}
NAMES = [f"base_model.model.layer.lora_{side}.weight" for side in "AB"]
THREE = WeightVersion(3)


def lora(step: int) -> State:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 256, generator=generator) for _ in NAMES)
    b[0, :step] += 1
    return {NAMES[0]: a.bfloat16(), NAMES[1]: b.bfloat16().t().contiguous()}


@dataclass
class PlainStorage:
    """Holds the adapter as PEFT would read it; refuses on request."""

    held: dict[str, State] = field(default_factory=dict)
    refusal: Exception | None = None

    def read(self, directory: Path) -> Any:
        assert (directory / "adapter_config.json").is_file()
        return load_file(directory / "adapter_model.safetensors")

    def check(self, form: Any) -> None:
        if self.refusal is not None:
            raise self.refusal

    def put(self, name: str, form: Any) -> None:
        self.check(form)
        self.held[name] = form

    def holds(self, name: str, state: State) -> bool:
        return all(torch.equal(self.held[name][key], tensor) for key, tensor in state.items())


@dataclass
class Engine:
    root: Path
    done: list[Published]
    weights: AdaptedWeights
    model: PlainModel
    storage: PlainStorage

    def adapter(self, store: str, version: int, **more: Any) -> Any:
        named = {"adapter": "policy", **more}
        return self.weights.load(
            RequestedVersion(store=store, version=WeightVersion(version), **named),
        )

    def base(self, version: int) -> Any:
        return self.weights.load(RequestedVersion(store="store", version=WeightVersion(version)))

    def stage(self, store: str, version: int, **more: Any) -> StageState:
        wanted = RequestedVersion(store=store, version=WeightVersion(version), **more)
        while (told := self.weights.stage(wanted)).state is StageState.RUNNING:
            pass
        return told.state

    def publishes(self, store: str, base: int, *steps: int) -> list[Published]:
        """Adapters trained on a version of the base store."""
        held = self.done[base - 1]
        on = Base(store="store", version=held.version, state_hash=held.state_hash)
        with Publisher(self.root / store, adapter=Adapter(on, CONFIG)) as publisher:
            return [publisher.publish(lora(step)) for step in steps]


@pytest.fixture
def engine(published: tuple[Path, list[Published]], states: tuple[State, ...]) -> Iterator[Engine]:
    """Base versions 1 to 8 in `store`; adapters 1 and 2 on base 3 in `lora`."""
    root = published[0].parent
    model, storage = PlainModel(states[0]), PlainStorage()
    base = EngineWeights(model, None, StoreRoot(root), packed_ahead_bytes=0)
    made = AdaptedWeights(base, AdapterStores(StoreRoot(root)), storage)
    engine = Engine(root, published[1], made, model, storage)
    engine.publishes("lora", 3, 1, 2)
    yield engine
    made.close()


def test_an_adapter_brings_its_base_along(engine: Engine, states: tuple[State, ...]) -> None:
    applied = engine.adapter("lora", 1)
    assert engine.model.holds(states[2])
    assert engine.storage.holds("policy", lora(1))
    report = engine.weights.report()
    assert (report["store"], report["version"]) == ("store", 3)
    told = report["adapters"]["policy"]
    assert told["state_hash"] == applied.state_hash
    assert (told["store"], told["version"], told["from_full"]) == ("lora", 1, True)
    assert (told["base_store"], told["base_version"]) == ("store", 3)


def test_a_new_run_s_adapter_takes_the_place_of_a_staged_one_of_its_number(engine: Engine) -> None:
    assert engine.stage("lora", 1) is StageState.READY
    shutil.rmtree(engine.root / "lora")
    (new,) = engine.publishes("lora", 3, 9)
    assert engine.adapter("lora", 1).state_hash == new.state_hash
    assert engine.storage.holds("policy", lora(9))


def test_a_verdict_of_all_ranks_is_on_the_base_that_an_adapter_brings(
    engine: Engine, states: tuple[State, ...]
) -> None:
    engine.base(2)
    wanted = RequestedVersion(store="lora", version=WeightVersion(1), adapter="policy")
    engine.weights.sums(wanted)
    engine.weights.judge(SumVerdict(wrong=("layer.weight",)))
    with pytest.raises(Corrupt, match="in this engine's ranks would not be the published state"):
        engine.weights.load(wanted)
    assert engine.model.holds(states[1])
    assert not engine.storage.held
    engine.weights.sums(wanted)
    engine.weights.judge(SumVerdict())
    engine.weights.load(wanted)
    assert engine.model.holds(states[2])
    assert engine.storage.holds("policy", lora(1))


def test_the_next_version_takes_the_place_of_the_one_before(engine: Engine) -> None:
    engine.adapter("lora", 1)
    loads = engine.model.loads
    applied = engine.adapter("lora", 2)
    assert not applied.from_full
    assert engine.storage.holds("policy", lora(2))
    assert list(engine.storage.held) == ["policy"]
    assert engine.model.loads == loads


def test_nothing_changes_while_an_adapter_and_its_base_are_staged(
    engine: Engine, states: tuple[State, ...]
) -> None:
    engine.base(2)
    assert engine.stage("lora", 1) is StageState.READY
    assert engine.model.holds(states[1])
    assert not engine.storage.held
    engine.adapter("lora", 1)
    assert engine.model.holds(states[2])


def test_a_stage_on_another_version_is_made_again(engine: Engine) -> None:
    engine.publishes("lora", 3, 3)
    engine.adapter("lora", 1)
    engine.stage("lora", 3)
    engine.adapter("lora", 2)
    engine.adapter("lora", 3)
    assert engine.storage.holds("policy", lora(3))


def test_an_adapter_of_a_newer_base_moves_the_base(
    engine: Engine, states: tuple[State, ...]
) -> None:
    engine.adapter("lora", 2)
    engine.publishes("lora", 5, 4)
    engine.adapter("lora", 3)
    assert engine.model.holds(states[4])
    assert engine.storage.holds("policy", lora(4))
    assert engine.weights.is_loaded


def test_a_base_does_not_move_under_an_adapter(engine: Engine, states: tuple[State, ...]) -> None:
    engine.adapter("lora", 1)
    before = engine.weights.report()
    with pytest.raises(ConfigError, match="is not the base of adapter policy"):
        engine.base(4)
    assert engine.model.holds(states[2])
    assert engine.weights.report() == before
    engine.base(3)
    assert engine.weights.report()["adapters"] == before["adapters"]


def test_a_base_that_would_be_refused_is_not_staged(engine: Engine) -> None:
    """A gateway then refuses the switch, and every engine serves on."""
    engine.adapter("lora", 1)
    with pytest.raises(ConfigError, match="or restart the engine to serve another base"):
        engine.stage("store", 4)
    assert engine.stage("store", 3) is StageState.READY
    assert engine.stage("store", 99) is StageState.FAILED


def test_an_adapter_of_an_older_base_is_stale(engine: Engine, states: tuple[State, ...]) -> None:
    engine.base(4)
    message = (
        r"base, store version 3, is older than version 4 of that store.*publish the adapter on"
    )
    with pytest.raises(Stale, match=message):
        engine.adapter("lora", 1)
    with pytest.raises(Stale, match=message):
        engine.stage("lora", 1)
    assert engine.model.holds(states[3])
    assert not engine.storage.held
    assert engine.weights.is_loaded


def test_two_adapters_share_a_base_and_neither_moves_it(
    engine: Engine, states: tuple[State, ...]
) -> None:
    engine.publishes("other", 3, 7)
    engine.publishes("next", 5, 8)
    engine.adapter("lora", 1)
    engine.adapter("other", 1, adapter="critic")
    assert engine.storage.holds("critic", lora(7))
    with pytest.raises(ConfigError, match="adapter critic to another base"):
        engine.adapter("next", 1)
    with pytest.raises(ConfigError, match="adapter critic to another base"):
        engine.stage("next", 1, adapter="policy")
    assert engine.model.holds(states[2])
    assert engine.storage.holds("policy", lora(1))


def test_an_adapter_that_fits_no_layer_leaves_base_and_adapter(
    engine: Engine, states: tuple[State, ...]
) -> None:
    engine.adapter("lora", 1)
    engine.publishes("lora", 5, 4)
    engine.storage.refusal = ConfigError("does not fit")
    with pytest.raises(ConfigError, match="does not fit"):
        engine.adapter("lora", 3)
    assert engine.model.holds(states[2])
    assert engine.storage.holds("policy", lora(1))
    assert engine.weights.is_loaded


def test_an_engine_whose_base_moved_without_its_adapter_holds_no_version(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.adapter("lora", 1)
    engine.publishes("lora", 5, 4)

    def torn(name: str, form: Any) -> None:
        raise RuntimeError("torn")

    with monkeypatch.context() as patched:
        patched.setattr(engine.storage, "put", torn)
        with pytest.raises(RuntimeError):
            engine.adapter("lora", 3)
    assert not engine.weights.is_loaded
    assert engine.weights.report() == {"in_doubt": True}
    engine.adapter("lora", 3)
    assert engine.weights.is_loaded


@pytest.mark.parametrize("loads_first", [True, False], ids=["loaded", "only staged"])
def test_a_version_of_another_run_brings_its_own_base(
    engine: Engine, states: tuple[State, ...], loads_first: bool
) -> None:
    """Its number is one that the engine has seen, on another base."""
    assert engine.stage("lora", 1) is StageState.READY
    if loads_first:
        engine.adapter("lora", 1)
    shutil.rmtree(engine.root / "lora")
    [published] = engine.publishes("lora", 5, 4)
    if loads_first:
        engine.stage("lora", 1)
    engine.adapter("lora", 1, state_hash=published.state_hash)
    assert engine.model.holds(states[4])
    assert engine.storage.holds("policy", lora(4))
    assert engine.weights.is_loaded


@pytest.mark.parametrize("knows", [True, False], ids=["state hash", "number"])
def test_a_version_that_was_staged_on_an_older_base_hinders_no_new_run_s(
    engine: Engine, states: tuple[State, ...], knows: bool
) -> None:
    """Never loaded: the engine's base moved on meanwhile."""
    assert engine.stage("lora", 1) is StageState.READY
    engine.base(5)
    shutil.rmtree(engine.root / "lora")
    [published] = engine.publishes("lora", 5, 4)
    expected = {"state_hash": published.state_hash} if knows else {}
    assert engine.stage("lora", 1, **expected) is StageState.READY
    engine.adapter("lora", 1, **expected)
    assert engine.model.holds(states[4])
    assert engine.storage.holds("policy", lora(4))


def test_a_new_run_s_base_is_staged_too(engine: Engine, states: tuple[State, ...]) -> None:
    """The run before had an adapter of this number on the base in force."""
    engine.base(3)
    assert engine.stage("lora", 1) is StageState.READY
    shutil.rmtree(engine.root / "lora")
    engine.publishes("lora", 5, 4)
    assert engine.stage("lora", 1) is StageState.READY
    shutil.rmtree(engine.root / "store")
    engine.adapter("lora", 1)
    assert engine.model.holds(states[4])
    assert engine.storage.holds("policy", lora(4))


@pytest.mark.parametrize("knows", [True, False], ids=["state hash", "number"])
def test_a_new_run_s_equal_adapter_brings_its_own_base(
    engine: Engine, states: tuple[State, ...], knows: bool
) -> None:
    """Runs of one seed begin with the same adapter."""
    engine.base(3)
    assert engine.stage("lora", 1) is StageState.READY
    shutil.rmtree(engine.root / "lora")
    [published] = engine.publishes("lora", 5, 1)
    expected = {"state_hash": published.state_hash} if knows else {}
    assert engine.stage("lora", 1, **expected) is StageState.READY
    engine.adapter("lora", 1, **expected)
    assert engine.model.holds(states[4])
    assert engine.storage.holds("policy", lora(1))


def test_a_file_system_of_unstable_file_numbers_keeps_a_version_ready(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = count()
    monkeypatch.setattr(DirectorySource, "stamp", lambda *_: f"{next(looks)}")
    assert engine.stage("lora", 1) is StageState.READY
    wanted = RequestedVersion(store="lora", version=WeightVersion(1))
    assert engine.weights.stage(wanted).state is StageState.READY
    assert engine.weights.stage(wanted).state is StageState.READY


def test_a_load_while_the_index_is_read_leaves_no_index_to_a_new_run(engine: Engine) -> None:
    wanted = RequestedVersion(store="lora", version=WeightVersion(1))
    assert engine.weights.stage(wanted).state is StageState.RUNNING
    engine.adapter("lora", 1)
    shutil.rmtree(engine.root / "lora")
    engine.publishes("lora", 5, 4)
    engine.adapter("lora", 1)
    assert engine.stage("lora", 1) is StageState.READY


def test_another_state_than_the_expected_one_is_a_failure_to_stage(engine: Engine) -> None:
    assert engine.stage("lora", 1) is StageState.READY
    assert engine.stage("lora", 1, state_hash="0" * 32) is StageState.FAILED
    assert engine.stage("lora", 1) is StageState.READY


def broken(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_broken_files_are_refused_and_what_was_in_force_stays(engine: Engine, file: str) -> None:
    engine.adapter("lora", 1)
    engine.publishes("again", 3, 5)
    broken(engine.root / "again" / "weight_v000001" / file)
    with pytest.raises(Corrupt, match=r"differs from the published|digest is not"):
        engine.adapter("again", 1)
    assert engine.storage.holds("policy", lora(1))
    assert engine.weights.is_loaded


@pytest.mark.parametrize(
    ("store", "given", "error", "message"),
    [
        ("lora", {"adapter": None}, ConfigError, "give the name that requests ask for it by"),
        ("lora", {"adapter": "../x"}, PeerProtocolError, "use 1 to 64 letters"),
        ("lora", {"state_hash": "0" * 32}, Corrupt, "the version is from another store"),
        ("store", {}, ConfigError, "holds whole models"),
        ("nowhere", {"adapter": None}, ConfigError, "no weight store at"),
    ],
)
def test_a_mistaken_request_changes_nothing(
    engine: Engine, store: str, given: dict[str, Any], error: type[RoseMuxError], message: str
) -> None:
    engine.base(3)
    with pytest.raises(error, match=message):
        engine.adapter(store, 1, **given)
    assert not engine.storage.held
    assert engine.weights.report()["version"] == THREE


def test_a_version_of_other_shapes_is_taken_whole(engine: Engine) -> None:
    engine.adapter("lora", 1)
    wider = {name: torch.cat([tensor, tensor], 0) for name, tensor in lora(6).items()}
    held = engine.done[2]
    on = Base(store="store", version=held.version, state_hash=held.state_hash)
    with Publisher(engine.root / "lora", adapter=Adapter(on, CONFIG)) as publisher:
        publisher.publish(wider)
    assert engine.adapter("lora", 3).from_full
    assert engine.storage.holds("policy", wider)


def test_no_step_waits_for_a_store_while_a_version_is_staged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: set[int] = set()
    read = DirectorySource.directories

    def seen(source: DirectorySource) -> frozenset[str]:
        readers.add(threading.get_ident())
        return read(source)

    monkeypatch.setattr(DirectorySource, "directories", seen)
    assert engine.stage("lora", 1, adapter="policy") is StageState.READY
    assert engine.stage("store", 99) is StageState.FAILED
    assert readers
    assert threading.get_ident() not in readers


def test_a_deep_sleep_drops_adapters_too(engine: Engine, states: tuple[State, ...]) -> None:
    engine.adapter("lora", 1)
    engine.weights.fall_asleep(1)
    assert engine.weights.report()["adapters"].keys() == {"policy"}
    engine.weights.fall_asleep(2)
    assert engine.weights.report() == {"in_doubt": True}
    engine.base(4)
    assert engine.weights.report()["adapters"] == {}
