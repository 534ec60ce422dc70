"""vLLM's trainer side publishes tensor by tensor, and every rank reads its source to the end."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("vllm.distributed.weight_transfer.factory")

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import WeightVersion
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.vllm.trainer import RoseMuxTrainer, RoseMuxTrainerInitInfo

TENSORS = 12


class Gathered:
    """Gathers each tensor when it is asked for; `most` is how many lived at a time."""

    def __init__(self, *, step: int = 0, twice: bool = False) -> None:
        self.step = step
        self.most = self.read = 0
        self._twice = twice
        self._living = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(TENSORS):
            self.read += 1
            yield f"layer.{0 if self._twice else number}", self._gathered(number)

    def _gathered(self, number: int) -> torch.Tensor:
        tensor = torch.full((1000,), float(number + self.step)).bfloat16()
        self._living += 1
        self.most = max(self.most, self._living)
        weakref.finalize(tensor, self._released)
        return tensor

    def _released(self) -> None:
        self._living -= 1


class Client:
    """Keeps what the engines are told."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update: dict[str, Any]) -> None:
        self.updates.append(update)

    def finish_weight_update(self, version: str) -> None: ...


def _trainer(store: Path, source: Any, client: Client, *, rank: int = 0) -> RoseMuxTrainer:
    info = RoseMuxTrainerInitInfo(str(store), rank=rank)
    return RoseMuxTrainer.trainer_init(info, client=client, source=source)


def test_one_gathered_tensor_lives_at_a_time(tmp_path: Path) -> None:
    source, client = Gathered(), Client()
    trainer = _trainer(tmp_path / "store", source, client)
    for step in (0, 1):
        source.step = step
        trainer.send_weights()
    trainer.shutdown()
    assert source.most == 1
    assert [update["version"] for update in client.updates] == [1, 2]
    held = {f"layer.{n}": torch.zeros(1000).bfloat16() for n in range(TENSORS)}
    Receiver(tmp_path / "store").sync(None, WeightVersion(2), TensorTarget(held))
    assert all((held[f"layer.{n}"] == n + 1).all() for n in range(TENSORS))


def test_a_refused_source_is_read_to_its_end_for_the_other_ranks(tmp_path: Path) -> None:
    source, client = Gathered(twice=True), Client()
    trainer = _trainer(tmp_path / "store", source, client)
    with pytest.raises(ConfigError, match=r"layer\.0 is given twice"):
        trainer.send_weights()
    assert (source.read, client.updates) == (TENSORS, [])
    assert source.most == 2, "the refused one is in the error's frames"
    trainer.shutdown()


def test_another_layout_is_refused_once_and_then_a_full_version(tmp_path: Path) -> None:
    client, narrow, wide = Client(), torch.ones(4), torch.ones(5)
    trainer = _trainer(tmp_path / "store", [("a", narrow)], client)
    trainer.send_weights()
    trainer.source = [("a", wide), ("b", wide)]
    with pytest.raises(ConfigError, match="publish all of it again, as a full version"):
        trainer.send_weights()
    trainer.send_weights()
    trainer.shutdown()
    assert [update["version"] for update in client.updates] == [1, 2]


def test_tied_names_are_published_under_each(tmp_path: Path) -> None:
    client, tied = Client(), torch.ones(4)
    trainer = _trainer(tmp_path / "store", [("embed", tied), ("head", tied)], client)
    trainer.send_weights()
    tied += 1
    trainer.send_weights()
    trainer.shutdown()
    held = {"embed": torch.zeros(4), "head": torch.zeros(4)}
    Receiver(tmp_path / "store").sync(None, WeightVersion(2), TensorTarget(held))
    assert (held["embed"] == 2).all()
    assert (held["head"] == 2).all()


def test_a_rank_that_sends_nothing_reads_its_source_too(tmp_path: Path) -> None:
    source, client = Gathered(), Client()
    trainer = _trainer(tmp_path / "store", source, client, rank=1)
    trainer.send_weights()
    trainer.shutdown()
    assert (source.read, source.most, client.updates) == (TENSORS, 1, [])
    assert not (tmp_path / "store").exists()
