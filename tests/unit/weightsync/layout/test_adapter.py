"""LoRA adapters: versions of their own, which fit one base and are refused on every other."""

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from harvester.contracts.errors import ConfigError, Corrupt, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.layout.adapter import Adapter, Base, checked_config
from weightsync.layout.names import Kind, VersionRef
from weightsync.publish.settings import WorkSettings
from weightsync.publisher import Publisher
from weightsync.reading.store import Store
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]
NAMES = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight" for side in "AB"]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
ONE, TWO = WeightVersion(1), WeightVersion(2)
BASE = Base(store="job-a", version=WeightVersion(7), state_hash="6d78392a5886177fe5b86e585a0b695a")


def _lora(step: int) -> State:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 32, generator=generator).bfloat16() for _ in NAMES)
    return {NAMES[0]: a, NAMES[1]: (b.float() * (1 + 0.001 * step)).bfloat16().t().contiguous()}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Publisher(tmp_path / "lora", adapter=Adapter(BASE, CONFIG)) as publisher:
        assert publisher.publish(_lora(0)).is_full
        assert not publisher.publish(_lora(1)).is_full
    return tmp_path / "lora"


def _blank() -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in _lora(0).items()}


def test_a_holder_of_the_base_takes_every_version(store: Path, same: Same) -> None:
    held, receiver = _blank(), Receiver(store, base=BASE)
    receiver.sync(None, ONE, TensorTarget(held))
    assert same(held, _lora(0))
    receiver.sync(ONE, TWO, TensorTarget(held))
    assert same(held, _lora(1))


def test_a_full_version_is_what_peft_loads(store: Path, same: Same) -> None:
    directory = store / "weight_v000001"
    assert same(safetensors.torch.load_file(directory / "adapter_model.safetensors"), _lora(0))
    assert json.loads((directory / "adapter_config.json").read_bytes()) == CONFIG


@pytest.mark.parametrize("version", [ONE, TWO])
def test_the_configuration_of_every_version_is_checked(store: Path, version: WeightVersion) -> None:
    ref = VersionRef(Kind.WEIGHT, version)
    record = Store(store).manifest(ref).adapter
    assert record is not None

    def read() -> dict[str, Any]:
        raw = Store(store).small_file(ref, "adapter_config.json", 1 << 20)
        return checked_config(raw, record, where=str(store))

    assert read() == CONFIG
    path = store / ref.directory / "adapter_config.json"
    path.write_bytes(path.read_bytes().replace(b"8", b"9"))
    with pytest.raises(Corrupt, match="differs from the published"):
        read()
    path.unlink()
    with pytest.raises(Corrupt, match=r"has no adapter_config\.json"):
        read()


@pytest.mark.parametrize(
    ("base", "error", "message"),
    [
        (None, ConfigError, "is an adapter for job-a"),
        (Base(store="job-a", version=WeightVersion(8), state_hash="00"), Stale, "job-a version 8"),
        (Base(store="job-b", version=WeightVersion(7), state_hash="00"), ConfigError, "job-b"),
    ],
)
def test_an_adapter_on_another_base_is_refused(
    store: Path, base: Base | None, error: type[Exception], message: str
) -> None:
    held = _blank()
    with pytest.raises(error, match=message):
        Receiver(store, base=base).sync(None, TWO, TensorTarget(held))
    assert not any(tensor.any() for tensor in held.values())


def test_the_same_base_under_another_name_is_the_same_base(store: Path) -> None:
    elsewhere = Base(store="copy-of-a", version=ONE, state_hash=BASE.state_hash)
    Receiver(store, base=elsewhere).sync(None, TWO, TensorTarget(_blank()))


def test_whole_weights_are_no_adapter(tmp_path: Path) -> None:
    with Publisher(tmp_path) as publisher:
        publisher.publish({"w": torch.ones(3)})
    with pytest.raises(ConfigError, match="no adapter but a whole model"):
        Receiver(tmp_path, base=BASE).sync(None, ONE, TensorTarget({"w": torch.ones(3)}))
    assert Store(tmp_path).manifest(VersionRef(Kind.WEIGHT, ONE)).adapter is None


def test_an_adapter_of_another_base_begins_with_a_full_version(tmp_path: Path) -> None:
    newer = Base(store="job-a", version=WeightVersion(8), state_hash="ab" * 16)
    for base, full in ((BASE, True), (BASE, False), (newer, True), (newer, False)):
        with Publisher(
            tmp_path / "lora",
            adapter=Adapter(base, CONFIG),
            work=WorkSettings(copy_dir=tmp_path / "copy"),
        ) as publisher:
            assert publisher.publish(_lora(0)).is_full == full
    Receiver(tmp_path / "lora", base=newer).sync(None, WeightVersion(4), TensorTarget(_blank()))


def test_a_store_has_adapters_or_models_and_a_publisher_of_the_other_kind_is_refused(
    tmp_path: Path,
) -> None:
    with Publisher(tmp_path / "lora", adapter=Adapter(BASE, CONFIG)) as publisher:
        publisher.publish(_lora(0))
    with Publisher(tmp_path / "job-a") as publisher:
        publisher.publish({"w": torch.ones(4)})
    with pytest.raises(ConfigError, match="the store has adapters of job-a"):
        Publisher(tmp_path / "lora")
    with pytest.raises(ConfigError, match="the store has whole models"):
        Publisher(tmp_path / "job-a", adapter=Adapter(BASE, CONFIG))
    assert (tmp_path / "job-a" / "LATEST").read_text() == "weight_v000001\n"
    with Publisher(tmp_path / "job-a") as publisher:
        publisher.publish({"w": torch.zeros(4)})


def test_an_adapter_store_takes_no_state_without_an_adapter_and_no_base_without_a_hash(
    tmp_path: Path,
) -> None:
    with (
        Publisher(tmp_path, adapter=Adapter(BASE, CONFIG)) as publisher,
        pytest.raises(ConfigError, match="no tensor of an adapter"),
    ):
        publisher.publish({"w": torch.ones(4)})
    unknown = Base(store="job-a", version=WeightVersion(8), state_hash="zz")
    with pytest.raises(ConfigError, match="base state hash 'zz': use 32 hex digits"):
        Publisher(tmp_path, adapter=Adapter(unknown, CONFIG))


def test_a_base_by_its_name_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapter base 'job-a': use Base"):
        Adapter("job-a", {"peft_type": "LORA"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config", [{"r": 4}, {"peft_type": 3}, {"peft_type": "LORA", "x": "y" * 2**20}]
)
def test_a_configuration_that_peft_would_not_write_is_a_mistake(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="adapter config"):
        Publisher(tmp_path, adapter=Adapter(BASE, config))


class Peft(StrEnum):
    LORA = "LORA"


class FakeLoraConfig:
    """A stand-in for PEFT's configuration, which has enumerations and sets."""

    def to_dict(self) -> dict[str, Any]:
        return CONFIG | {"peft_type": Peft.LORA, "target_modules": {"v_proj", "q_proj"}}


def test_a_configuration_object_of_peft_is_published_as_its_fields(tmp_path: Path) -> None:
    with Publisher(tmp_path / "lora", adapter=Adapter(BASE, FakeLoraConfig())) as publisher:
        publisher.publish(_lora(0))
    raw = (tmp_path / "lora/weight_v000001/adapter_config.json").read_bytes()
    assert json.loads(raw) == CONFIG | {"target_modules": ["q_proj", "v_proj"]}


def test_another_object_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapter config"):
        Publisher(tmp_path, adapter=Adapter(BASE, object()))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Path, str])
def test_a_configuration_file_travels_as_it_is(
    tmp_path: Path, kind: Callable[[Path], Path | str]
) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text('{"peft_type":   "LORA"}\n')
    with Publisher(tmp_path / "lora", adapter=Adapter(BASE, kind(file))) as publisher:
        publisher.publish(_lora(0))
    assert (tmp_path / "lora/weight_v000001/adapter_config.json").read_text() == file.read_text()
    with pytest.raises(ConfigError, match="adapter config"):
        Publisher(tmp_path / "other", adapter=Adapter(BASE, kind(tmp_path / "missing.json")))
