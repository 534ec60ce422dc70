"""Skip deltas: exact to the bit, smaller than what they replace, and never in a publisher's way."""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from harvester.contracts.errors import ConfigError, Exhausted, Unsupported
from harvester.contracts.ids import WeightVersion
from weightsync.encoding.codec import Encoding
from weightsync.layout.names import Kind, VersionRef, named_ref
from weightsync.publish import composing, skip_deltas
from weightsync.publish.directory_writer import DirectoryWriter
from weightsync.publish.settings import VersionSettings, WorkSettings
from weightsync.publish.skip_deltas import due_bases
from weightsync.publish.version_writer import VersionWriter
from weightsync.publisher import Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.transport.directory import DirectorySource

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]


def _published(store: Path, states: tuple[State, ...], **settings: object) -> None:
    with Publisher(store, **settings) as publisher:  # type: ignore[arg-type]
        for state in states:
            publisher.publish(state)


def _skips(store: Path) -> list[str]:
    return sorted(path.name for path in store.glob("skip_*"))


def _target(state: State) -> TensorTarget:
    return TensorTarget({name: tensor.clone() for name, tensor in state.items()})


@pytest.fixture
def store(tmp_path: Path, states: tuple[State, ...]) -> Path:
    """A store with versions 1 to 12, of which the first is full."""
    _published(tmp_path / "store", states)
    return tmp_path / "store"


def test_every_fourth_version_has_one_and_every_eighth_two_more() -> None:
    bases = {v: due_bases(WeightVersion(v), full=WeightVersion(3)) for v in range(1, 28)}
    assert {v: found for v, found in bases.items() if found} == {
        7: (3,),
        11: (7, 3),
        15: (11,),
        19: (15, 11, 3),
        23: (19,),
        27: (23, 19, 3),
    }


@pytest.mark.parametrize("current", [1, 2, 5, 9])
def test_a_receiver_that_fell_behind_reads_them_and_ends_at_the_same_bits(
    store: Path, states: tuple[State, ...], same: Same, current: int
) -> None:
    receiver = Receiver(store)
    plan = receiver.plan(WeightVersion(current), WeightVersion(12))
    skipped = [step.ref for step in plan.steps if step.ref.kind is Kind.SKIP]
    assert bool(skipped) is (current < 9)
    held = {name: tensor.clone() for name, tensor in states[current - 1].items()}
    receiver.sync(WeightVersion(current), WeightVersion(12), TensorTarget(held))
    assert same(held, states[11])


def test_a_joiner_reads_the_full_checkpoint_and_the_longest_one(
    store: Path, states: tuple[State, ...], same: Same, blank: State
) -> None:
    receiver = Receiver(store)
    plan = receiver.plan(None, WeightVersion(9))
    assert [step.ref.directory for step in plan.steps] == [
        "weight_v000001",
        "skip_v000001_v000009",
    ]
    receiver.sync(None, WeightVersion(9), TensorTarget(blank))
    assert same(blank, states[8])


def test_one_is_smaller_than_the_deltas_that_it_replaces(store: Path) -> None:
    receiver = Receiver(store)
    skipping = receiver.plan(WeightVersion(1), WeightVersion(9))
    singles = [receiver.plan(WeightVersion(v - 1), WeightVersion(v)) for v in range(2, 10)]
    assert skipping.size_bytes < sum(plan.size_bytes for plan in singles) / 2


@pytest.mark.parametrize("part", ["model.safetensors.index.json", "READY", "shard"])
def test_a_broken_one_costs_a_receiver_only_its_bytes(
    store: Path, states: tuple[State, ...], same: Same, part: str
) -> None:
    directory = store / "skip_v000001_v000009"
    file = next(directory.glob("model-*")) if part == "shard" else directory / part
    if part == "READY":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-40] + b"\x55" * 40)
    held = {name: tensor.clone() for name, tensor in states[0].items()}
    Receiver(store).sync(WeightVersion(1), WeightVersion(9), TensorTarget(held))
    assert same(held, states[8])


def test_dense_changes_between_others_are_composed(tmp_path: Path, same: Same) -> None:
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(4000, generator=generator).bfloat16()
    run = [{"a": first.clone(), "b": first.clone()}]
    for step in range(8):
        new = {name: tensor.clone() for name, tensor in run[-1].items()}
        new["a"][step * 7] += 1
        if step == 3:
            new["a"] = torch.zeros_like(first)
        if step < 4:
            new["b"] = new["b"] * (0.5 if step % 2 else 2.0)
        run.append(new)
    _published(tmp_path / "store", tuple(run))
    held = {name: tensor.clone() for name, tensor in run[0].items()}
    receiver = Receiver(tmp_path / "store")
    plan = receiver.plan(WeightVersion(1), WeightVersion(9))
    assert [step.ref.directory for step in plan.steps] == ["skip_v000001_v000009"]
    assert plan.steps[0].manifest.encoding_of("a") is Encoding.DENSE
    assert "b" not in plan.steps[0].manifest.weight_map, "its changes cancel out"
    receiver.sync(WeightVersion(1), WeightVersion(9), TensorTarget(held))
    assert same(held, run[8])


def test_a_restarted_publisher_goes_on_with_them(tmp_path: Path, states: tuple[State, ...]) -> None:
    for part in (states[:3], states[2:7]):
        _published(tmp_path / "store", part, work=WorkSettings(copy_dir=tmp_path / "copy"))
    assert _skips(tmp_path / "store") == ["skip_v000001_v000005"]


@pytest.mark.parametrize(
    "settings", [{"skip_deltas": False}, {"encoding": Encoding.XOR}, {"anchor_every": 3}]
)
def test_a_store_has_none_where_they_are_off_or_anchors_are_nearer(
    tmp_path: Path, states: tuple[State, ...], settings: dict[str, Any]
) -> None:
    _published(tmp_path / "store", states, versions=VersionSettings(**settings))
    assert _skips(tmp_path / "store") == []


def test_deltas_that_do_not_add_up_are_refused_by_their_indexes(
    tmp_path: Path, states: tuple[State, ...], caplog: pytest.LogCaptureFixture
) -> None:
    settings = VersionSettings(encoding=Encoding.CONTEXT)
    work = WorkSettings(copy_dir=tmp_path / "copy")
    _published(tmp_path / "store", states[:4], versions=settings, work=work)
    _published(tmp_path / "store", states[4:6], work=work)
    assert _skips(tmp_path / "store") == []
    assert "left out" not in caplog.text, "no fault to warn of"
    for version in range(2, 7):
        for shard in (tmp_path / f"store/weight_v{version:06d}").glob("*.safetensors"):
            shard.unlink()
    ref = VersionRef(Kind.SKIP, WeightVersion(6), WeightVersion(2))
    with pytest.raises(Unsupported, match="context do not add up"):
        composing.composed_files(DirectorySource(tmp_path / "store"), ref, threading.Event())


def test_a_chain_that_is_too_large_has_none_and_publishing_goes_on(
    tmp_path: Path,
    states: tuple[State, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(composing, "_SMALL_BYTES", 1000)
    with caplog.at_level(logging.INFO):
        _published(tmp_path / "store", states)
    assert _skips(tmp_path / "store") == []
    assert Receiver(tmp_path / "store").latest() == 12
    assert "left out" in caplog.text


def test_a_publisher_that_is_closed_waits_for_none_that_takes_long(
    tmp_path: Path, states: tuple[State, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*given: Any) -> None:
        begun.set()
        goes_on.wait(60)

    monkeypatch.setattr(composing, "composed", slow)
    monkeypatch.setattr(skip_deltas, "CLOSE_S", 0.01)
    with Publisher(tmp_path / "store") as publisher:
        for state in states[:9]:
            publisher.publish(state)
        assert begun.wait(30)
    assert not goes_on.is_set(), "it was not waited for"
    goes_on.set()
    assert _skips(tmp_path / "store") == []
    assert list((tmp_path / "store").glob(".tmp-*")) == []


def test_a_publisher_that_is_dropped_gives_the_store_back(
    tmp_path: Path, states: tuple[State, ...]
) -> None:
    publisher = Publisher(tmp_path / "store")
    for state in states[:6]:
        publisher.publish(state)
    del publisher
    with Publisher(tmp_path / "store") as publisher:
        assert publisher.publish(states[6]).version == 7


def test_nothing_that_goes_wrong_with_one_reaches_the_trainer(
    tmp_path: Path,
    states: tuple[State, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(*given: Any) -> None:
        raise MemoryError("no pages")

    monkeypatch.setattr(composing, "composed", failing)
    _published(tmp_path / "store", states)
    assert Receiver(tmp_path / "store").latest() == 12
    assert "left out: no pages" in caplog.text


def test_a_failure_at_the_end_masks_no_error_of_the_trainer_and_keeps_no_lock(
    tmp_path: Path, states: tuple[State, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*given: Any, **named: Any) -> None:
        raise ConfigError("it has another publisher")

    def train() -> None:
        with Publisher(
            tmp_path / "store", work=WorkSettings(copy_dir=tmp_path / "copy")
        ) as publisher:
            for state in states[:5]:
                publisher.publish(state)
            monkeypatch.setattr(VersionWriter, "begin_skip", failing)
            monkeypatch.setattr(DirectoryWriter, "sweep", failing)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    monkeypatch.undo()
    with Publisher(tmp_path / "store", work=WorkSettings(copy_dir=tmp_path / "copy")) as publisher:
        assert publisher.publish(states[5]).version == 6


def test_those_that_wait_for_the_next_publish_take_little_memory(
    tmp_path: Path, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, composed_skip = [], skip_deltas.composed_skip

    def observed(*given: Any, **named: Any) -> Any:
        waiting.append(composed_skip(*given, **named))
        return waiting[-1]

    monkeypatch.setattr(composing, "BUDGET_BYTES", 1 << 20)
    monkeypatch.setattr(skip_deltas, "composed_skip", observed)
    generator = torch.Generator().manual_seed(5)
    states = tuple(
        {f"w{i}": torch.randn(1 << 17, generator=generator).bfloat16() for i in range(8)}
        for _ in range(5)
    )
    _published(tmp_path / "store", states, work=WorkSettings(shard_bytes=1))
    (files,) = (skip.files.values() for skip in waiting)
    kept_bytes = sum(file.kept_bytes for file in files)
    assert 0 < kept_bytes <= 1 << 19 < sum(file.size_bytes for file in files)
    held = {name: tensor.clone() for name, tensor in states[0].items()}
    Receiver(tmp_path / "store").sync(WeightVersion(1), WeightVersion(5), TensorTarget(held))
    assert same(held, states[4])
    assert _skips(tmp_path / "store") == ["skip_v000001_v000005"]


def test_a_store_that_falls_silent_is_waited_for_once(
    tmp_path: Path, states: tuple[State, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def silent(_: VersionWriter, ref: VersionRef, **__: object) -> str:
        begun.append(ref.version)
        raise Exhausted("no answer; gave up after 60 s")

    with Publisher(tmp_path / "store") as publisher:
        for state in states[:8]:
            publisher.publish(state)
        monkeypatch.setattr(VersionWriter, "begin_skip", silent)
        publisher.publish(states[8])
    assert begun.count(9) <= 1, "version 9 has two"
    assert begun


def test_a_version_fits_into_the_quota_by_their_deletion(
    tmp_path: Path, states: tuple[State, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _published(tmp_path / "all", states, versions=VersionSettings(skip_deltas=False))
    quota = sum(file.stat().st_size for file in (tmp_path / "all").rglob("*") if file.is_file())
    finished, composed_skip = threading.Event(), skip_deltas.composed_skip

    def observed(*given: Any, **named: Any) -> Any:
        try:
            return composed_skip(*given, **named)
        finally:
            finished.set()

    monkeypatch.setattr(skip_deltas, "composed_skip", observed)
    seen: set[str] = set()
    with Publisher(tmp_path / "store", versions=VersionSettings(max_bytes=quota)) as publisher:
        for state in states:
            if publisher.publish(state).version == 5:
                assert finished.wait(60)
            seen |= {*_skips(tmp_path / "store")}
    assert "skip_v000001_v000005" in seen
    assert Receiver(tmp_path / "store").latest() == 12
    assert len(list((tmp_path / "store").glob("weight_*"))) == 12
    files = [file for file in (tmp_path / "store").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= quota + 1000, "lock and LATEST apart"


def test_those_of_a_pruned_chain_are_deleted(tmp_path: Path, states: tuple[State, ...]) -> None:
    _published(
        tmp_path / "store", states, versions=VersionSettings(anchor_every=5, keep_versions=1)
    )
    assert _skips(tmp_path / "store") == []
    assert (tmp_path / "store" / "anchor_v000011").exists()


@pytest.mark.parametrize(
    "name",
    ["skip_v000001", "skip_v000005_v000005", "skip_v000009_v000005", "weight_v000001_v000005"],
)
def test_a_directory_of_another_name_is_no_skip_delta(name: str) -> None:
    assert named_ref(name) is None
    good = named_ref("skip_v000001_v000005")
    assert good == VersionRef(Kind.SKIP, WeightVersion(5), WeightVersion(1))
    assert good is not None
    assert good.directory == "skip_v000001_v000005"
