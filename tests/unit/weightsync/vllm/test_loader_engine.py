"""vLLM 0.24's worker, whose own calls would take the model apart, updates through our engine.

That version's classes are faked: its torch is not the installed one. That it has them in this
shape is what `make compat` reads in its wheel.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch

from harvester.contracts.errors import Corrupt, Unsupported
from tests.unit.weightsync.vllm.plain_model import PlainModel
from weightsync.publisher import Published

State = dict[str, torch.Tensor]
I = TypeVar("I")  # noqa: E741
U = TypeVar("U")
OURS = ("update_info", "worker_weights", "loader_engine")


class FakeEngine(Generic[I, U]):
    """A stand-in for the base class of 0.24, which takes the ranks only."""

    def __init__(self, config: Any, parallel_config: Any, model: Any) -> None:
        self.config, self.parallel_config, self.model = config, parallel_config, model

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return self.update_info_cls(**update_dict)  # type: ignore[attr-defined]


class FakeInfo:
    """Base class of an engine's update arguments."""


def fake_worker() -> Any:
    """A stand-in for the worker of 0.24: it takes models apart, and waits for an accelerator."""

    class Worker:
        def __init__(self, model: PlainModel) -> None:
            self.model = model
            self.device = torch.device("cpu")
            self.vllm_config = SimpleNamespace(
                model_config=None,
                parallel_config=SimpleNamespace(world_size=1),
                load_config=SimpleNamespace(load_format="auto"),
                lora_config=None,
            )
            self.weight_transfer_engine: Any = None
            self._weight_update_active = False
            self.said: list[Any] = []

        def sleep(self, level: int = 1) -> None:
            self.said.append(("sleep", level))

        def wake_up(self, tags: list[str] | None = None) -> None:
            self.said.append(("wake_up", tags))

        def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
            if self._weight_update_active:
                raise RuntimeError("already active")
            self.said.append(("start", is_checkpoint_format))
            self._weight_update_active = True

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.said.append(("update", update_info))

        def finish_weight_update(self) -> None:
            if not self._weight_update_active:
                raise RuntimeError("finish without start")
            self._weight_update_active = False
            self.said.append("finish")

    return Worker


def offload(backend: str, group: int) -> Any:
    """vLLM's settings of weights outside the accelerator."""
    prefetch = SimpleNamespace(offload_group_size=group)
    return SimpleNamespace(offload_backend=backend, prefetch=prefetch)


def modules(**named: Any) -> ModuleType:
    module = ModuleType("fake")
    vars(module).update(named)
    return module


@pytest.fixture
def loader_engine(
    monkeypatch: pytest.MonkeyPatch, published: tuple[Path, list[Published]]
) -> Iterator[Any]:
    """The module as vLLM 0.24 would import it."""
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, modules(__path__=[]))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker", modules(__path__=[]))
    base = modules(
        WeightTransferEngine=FakeEngine,
        WeightTransferInitInfo=FakeInfo,
        WeightTransferUpdateInfo=FakeInfo,
    )
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    worker = modules(Worker=fake_worker())
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", worker)
    for name in OURS:
        monkeypatch.delitem(sys.modules, f"weightsync.vllm.{name}", raising=False)
    monkeypatch.setenv("ROSEMUX_WEIGHT_ROOT", str(published[0].parent))
    monkeypatch.setattr("weightsync.vllm.cpu_linear.check_installed", lambda: None)
    yield importlib.import_module("weightsync.vllm.loader_engine")
    for name in OURS:
        sys.modules.pop(f"weightsync.vllm.{name}", None)


@pytest.fixture
def worker(loader_engine: Any, states: tuple[State, ...]) -> Iterator[Any]:
    made = loader_engine.Worker(PlainModel(states[0]))
    made.weight_transfer_engine = loader_engine.LoaderShapedEngine(None, None, made.model)
    yield made
    made.weight_transfer_engine.shutdown()


def update(worker: Any, version: int, **more: Any) -> None:
    worker.start_weight_update()
    worker.update_weights({"store": "store", "version": version, **more})
    worker.finish_weight_update()


def test_a_version_is_loaded_without_taking_the_model_apart(
    worker: Any, states: tuple[State, ...], published: tuple[Path, list[Published]]
) -> None:
    assert worker.rosemux_weights() == {}
    for version in (2, 3):
        update(worker, version)
        assert worker.model.holds(states[version - 1])
        told = worker.rosemux_weights()
        assert told["state_hash"] == published[1][version - 1].state_hash
    assert worker.said == [("start", False), "finish"] * 2


def test_a_store_that_is_not_there_fails_to_be_staged_in_words(worker: Any) -> None:
    """An error without an answer would let the gateway switch to it."""
    reply = worker.rosemux_stage(store="nowhere", version=2)
    assert reply["state"] == "failed"
    assert "no weight store at" in reply["message"]
    assert "ROSEMUX_WEIGHT_ROOT" in reply["message"], "a gateway hides the path"


def test_a_version_is_staged_before_the_first_update(
    worker: Any, states: tuple[State, ...]
) -> None:
    while (told := worker.rosemux_stage(store="store", version=2))["state"] == "running":
        pass
    assert told == {"state": "ready", "message": ""}
    assert not worker.model.holds(states[1])
    update(worker, 2)
    assert worker.model.holds(states[1])


def test_a_refused_update_ends_the_session_and_leaves_the_version(
    worker: Any, states: tuple[State, ...]
) -> None:
    update(worker, 2)
    worker.start_weight_update(is_checkpoint_format=True)
    with pytest.raises(Corrupt, match="the version is from another store"):
        worker.update_weights({"store": "store", "version": 3, "state_hash": "0" * 32})
    with pytest.raises(RuntimeError):
        worker.finish_weight_update()
    assert worker.model.holds(states[1])
    update(worker, 3)
    assert worker.model.holds(states[2])


def test_an_update_needs_its_session(worker: Any) -> None:
    with pytest.raises(RuntimeError, match="start_weight_update must be called"):
        worker.update_weights({"store": "store", "version": 2})


def test_workers_with_another_engine_are_left_alone(worker: Any, loader_engine: Any) -> None:
    other = loader_engine.Worker(worker.model)
    loader_engine.redirect(loader_engine.Worker)
    other.start_weight_update()
    other.update_weights({"names": []})
    other.finish_weight_update()
    assert other.said == [("start", True), ("update", {"names": []}), "finish"]


class Fp8LinearMethod:
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...


def test_a_model_that_cannot_follow_is_refused_when_the_engine_is_made(loader_engine: Any) -> None:
    layer: Any = torch.nn.Linear(2, 2)
    layer.quant_method = Fp8LinearMethod()
    with pytest.raises(Unsupported, match="Fp8LinearMethod"):
        loader_engine.LoaderShapedEngine(None, None, torch.nn.ModuleDict({"proj": layer}))


@pytest.mark.parametrize(
    "settings",
    [
        {"parallel_config": SimpleNamespace(world_size=1, enable_eplb=True)},
        {"offload_config": offload("auto", 4)},
        {"offload_config": offload("prefetch", 4)},
    ],
    ids=["experts that move", "prefetched layers", "prefetched layers by name"],
)
def test_an_engine_that_moves_its_weights_is_refused(worker: Any, settings: dict[str, Any]) -> None:
    vars(worker.vllm_config).update(settings)
    with pytest.raises(Unsupported, match=r"backend rosemux: .*--(enable-eplb|offload-group-size)"):
        worker.start_weight_update()


def test_an_engine_that_offloads_without_copies_is_taken(worker: Any) -> None:
    worker.vllm_config.offload_config = offload("uva", 4)
    update(worker, 2)
    worker.vllm_config.offload_config = offload("auto", 0)
    update(worker, 3)


def test_a_worker_s_sleep_reaches_the_version_that_it_reports(worker: Any) -> None:
    worker.sleep(level=2)
    worker.wake_up()
    update(worker, 2)
    worker.sleep(1)
    assert worker.rosemux_weights()["version"] == 2
    assert worker.rosemux_stage(store="store", version=3)["state"] == "asleep"
    worker.wake_up(tags=["kv_cache"])
    assert worker.rosemux_stage(store="store", version=3)["state"] == "asleep"
    worker.wake_up(tags=["weights"])
    assert worker.rosemux_stage(store="store", version=3)["state"] == "running"
    worker.sleep(level=2)
    assert worker.rosemux_weights() == {"in_doubt": True}
    worker.wake_up(None)
    update(worker, 3)
    assert worker.rosemux_weights()["version"] == 3
    slept = [call for call in worker.said if call[0] == "sleep"]
    assert slept == [("sleep", 2), ("sleep", 1), ("sleep", 2)], "once each"


def test_a_worker_without_our_engine_sleeps_as_before(worker: Any, loader_engine: Any) -> None:
    other = loader_engine.Worker(worker.model)
    other.sleep(2)
    other.wake_up(["weights"])
    assert other.said == [("sleep", 2), ("wake_up", ["weights"])]
