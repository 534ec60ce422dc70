"""An anchor is written beside the trainer's next step, and costs no version when it fails."""

import errno
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.ids import WeightVersion
from weightsync.layout.durable import write_durably
from weightsync.publish.directory_writer import WritableDirectory
from weightsync.publish.object_writer import ObjectDraft
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]
_WAIT_S = 60


class Gate:
    """Writes files; those of an anchor once it is opened, or with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.reached, self.opened = Event(), Event()

    def __call__(self, path: Path, chunks: Iterable[Any]) -> int:
        if path.parent.name.startswith(".tmp-anchor"):
            self.reached.set()
            if self.error is not None:
                raise self.error
            assert self.opened.wait(_WAIT_S)
        return write_durably(path, chunks)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def _received(store: Path | str, version: int, like: State) -> State:
    held = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with closing(Receiver(store)) as receiver:
        receiver.sync(None, WeightVersion(version), TensorTarget(held))
    return held


def test_a_version_is_there_before_its_anchor_and_the_next_waits_for_it(
    tmp_path: Path, states: tuple[State, ...], same: Same, gate: Gate
) -> None:
    with Publisher(
        WritableDirectory(tmp_path, write=gate), versions=VersionSettings(anchor_every=1)
    ) as publisher:
        publisher.publish(states[0])
        step = publisher.publish(states[1])
        assert (step.version, step.bytes_anchor) == (2, step.bytes_dense)
        assert gate.reached.wait(_WAIT_S)
        assert not list(tmp_path.glob("anchor_*"))
        assert Receiver(tmp_path).latest() == 2
        assert same(_received(tmp_path, 2, states[0]), states[1])
        with ThreadPoolExecutor(1) as trainer:
            third = trainer.submit(publisher.publish, states[2])
            assert wait([third], 0.2).not_done
            gate.opened.set()
            assert third.result().version == 3
        assert (tmp_path / "anchor_v000002").exists()
    for leftover in ("weight_v000001", "weight_v000002"):
        shutil.rmtree(tmp_path / leftover)
    assert same(_received(tmp_path, 2, states[0]), states[1]), "of the copy before it moved"


def test_a_publisher_that_is_closed_has_written_its_anchor(
    tmp_path: Path, states: tuple[State, ...], gate: Gate
) -> None:
    publisher = Publisher(
        WritableDirectory(tmp_path, write=gate), versions=VersionSettings(anchor_every=1)
    )
    for state in states[:2]:
        publisher.publish(state)
    with ThreadPoolExecutor(1) as trainer:
        closing_it = trainer.submit(publisher.close)
        assert wait([closing_it], 0.2).not_done
        gate.opened.set()
        closing_it.result()
    assert (tmp_path / "anchor_v000002").exists()
    Publisher(tmp_path).close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left in"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_anchor_that_cannot_be_written_is_named_and_due_again(
    tmp_path: Path,
    states: tuple[State, ...],
    same: Same,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    reason: str,
) -> None:
    gate = Gate(error)
    with Publisher(
        WritableDirectory(tmp_path, write=gate), versions=VersionSettings(anchor_every=2)
    ) as publisher:
        done = [publisher.publish(state) for state in states[:4]]
        assert [step.anchor_fault[:23] for step in done] == ["", "", "", "version 3 has no anchor"]
        assert reason in done[3].anchor_fault
        assert not list(tmp_path.glob("anchor_*"))
    assert f"version 4 has no anchor: {reason}"[:32] in caplog.text, "a closed one has a log only"
    assert not list(tmp_path.glob(".tmp-*"))
    gate.error = None
    gate.opened.set()
    with Publisher(
        WritableDirectory(tmp_path, write=gate), versions=VersionSettings(anchor_every=1)
    ) as publisher:
        done = [publisher.publish(state) for state in states[4:7]]
    assert [step.anchor_fault for step in done] == [""] * 3
    assert (tmp_path / "anchor_v000007").exists()
    assert same(_received(tmp_path, 7, states[0]), states[6])


def test_a_version_that_is_refused_leaves_the_anchor_before_it(
    tmp_path: Path, states: tuple[State, ...]
) -> None:
    with Publisher(tmp_path, versions=VersionSettings(anchor_every=1)) as publisher:
        for state in states[:2]:
            publisher.publish(state)
        with pytest.raises(ConfigError, match="given twice"):
            publisher.publish(iter([*states[2].items(), *states[2].items()]))
        assert (tmp_path / "anchor_v000002").exists()
        assert publisher.publish(states[2]).version == 3


def test_the_publisher_that_takes_a_store_over_gets_no_anchor_of_the_older_one(
    tmp_path: Path,
    states: tuple[State, ...],
    same: Same,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    older = Publisher(
        WritableDirectory(tmp_path, write=gate), versions=VersionSettings(anchor_every=1)
    )
    for state in states[:2]:
        older.publish(state)
    assert gate.reached.wait(_WAIT_S)
    with Publisher(tmp_path) as newer:
        step = newer.publish(states[2])
        gate.opened.set()
        with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="another publish"):
            older.publish(states[3])
        older.close()
    assert "version 2 has no anchor" in caplog.text
    assert sorted(path.name for path in tmp_path.glob("*_v*")) == [
        "weight_v000001",
        "weight_v000002",
        "weight_v000003",
    ]
    assert same(_received(tmp_path, step.version, states[0]), states[2])


def test_an_anchor_s_last_room_goes_to_no_skip_delta(
    tmp_path: Path, states: tuple[State, ...]
) -> None:
    def size() -> int:
        return sum(file.stat().st_size for path in store.glob("*_v*") for file in path.iterdir())

    store = tmp_path / "free"
    with Publisher(store, versions=VersionSettings(skip_deltas=False, anchor_every=8)) as publisher:
        for state in states[:9]:
            publisher.publish(state)
    quota, store = size() + 8, tmp_path / "store"
    with Publisher(store, versions=VersionSettings(max_bytes=quota, anchor_every=8)) as publisher:
        for state in states[:9]:
            assert not publisher.publish(state).anchor_fault
    assert (store / "anchor_v000009").exists()
    assert size() <= quota


def test_old_versions_go_once_the_anchor_that_replaces_them_is_there(
    tmp_path: Path, states: tuple[State, ...], same: Same, gate: Gate
) -> None:
    publisher = Publisher(
        WritableDirectory(tmp_path, write=gate),
        versions=VersionSettings(anchor_every=1, keep_versions=1),
    )
    for state in states[:2]:
        publisher.publish(state)
    assert gate.reached.wait(_WAIT_S)
    assert (tmp_path / "weight_v000001").exists()
    assert same(_received(tmp_path, 2, states[0]), states[1])
    gate.opened.set()
    publisher.close()
    assert sorted(path.name for path in tmp_path.glob("*_v*")) == [
        "anchor_v000002",
        "weight_v000002",
    ]


def test_an_object_store_s_anchor_is_written_beside_the_step_too(
    states: tuple[State, ...], same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, opened, write_all = "memory://anchors/job-a", Event(), ObjectDraft.write_all
    refusals: list[Exception] = [Exhausted("the store is silent")]

    def held_up(draft: ObjectDraft, files: Any) -> None:
        if draft._prefix.startswith("anchor"):
            assert opened.wait(_WAIT_S)
            if refusals:
                raise refusals.pop()
        write_all(draft, files)

    monkeypatch.setattr(ObjectDraft, "write_all", held_up)
    with Publisher(url, versions=VersionSettings(anchor_every=1)) as publisher:
        for state in states[:2]:
            publisher.publish(state)
        assert same(_received(url, 2, states[0]), states[1])
        opened.set()
        fault = publisher.publish(states[2]).anchor_fault
        assert fault == "version 2 has no anchor: the store is silent"
        assert publisher.publish(states[3]).anchor_fault == ""
    with closing(Receiver(url)) as receiver:
        directories = [step.ref.directory for step in receiver.plan(None, WeightVersion(4)).steps]
    assert directories == ["anchor_v000004"]
    assert same(_received(url, 4, states[0]), states[3])
