"""Adapters and their configuration come through servers and relays as they were published."""

from pathlib import Path

import pytest
import torch

from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from tests.weight_servers import HASTY, relayed, served
from weightsync.elements.bits import bits_of
from weightsync.layout.adapter import Adapter, Base
from weightsync.publisher import Publisher
from weightsync.transport.location import StoreRoot
from weightsync.vllm.adapter_stores import AdapterStores

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
BASE = Base(store="job-a", version=WeightVersion(7), state_hash="6d78392a5886177fe5b86e585a0b695a")
NAME = "base_model.model.q_proj.lora_A.weight"


def state(step: int) -> dict[str, torch.Tensor]:
    return {NAME: torch.arange(400.0).reshape(4, 100) + step}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Publisher(tmp_path / "stores" / "lora", adapter=Adapter(BASE, CONFIG)) as publisher:
        publisher.publish(state(1))
        publisher.publish(state(2))
    return tmp_path / "stores"


def test_a_relay_passes_the_configuration_on(root: Path, tmp_path: Path) -> None:
    with served(root) as url, relayed(url, tmp_path / "cache") as relay:
        stores = AdapterStores(StoreRoot(relay, HASTY))
        first = stores.copied("lora", WeightVersion(1), None)
        second = stores.copied("lora", WeightVersion(2), first)
        stores.close()
    assert first.config == second.config == CONFIG
    assert (first.bits[NAME] == bits_of(state(1)[NAME])).all()
    assert (second.bits[NAME] == bits_of(state(2)[NAME])).all()
    assert not second.applied.from_full
    assert second.record.base_state_hash == BASE.state_hash


def test_a_configuration_that_was_changed_on_the_way_is_refused(root: Path) -> None:
    config = root / "lora" / "weight_v000002" / "adapter_config.json"
    config.write_bytes(config.read_bytes().replace(b"8", b"9"))
    with served(root) as url:
        stores = AdapterStores(StoreRoot(url, HASTY))
        with pytest.raises(Corrupt, match="differs from the published"):
            stores.copied("lora", WeightVersion(2), None)
        stores.close()
