"""Publishing: versions appear whole or not at all, and numbers are never used twice."""

import errno
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from harvester.contracts.errors import ConfigError, Exhausted, Unsupported
from harvester.contracts.ids import WeightVersion
from weightsync.codec import Encoding
from weightsync.publisher import Published, Publisher
from weightsync.receiver import Receiver
from weightsync.store_writer import write_durably
from weightsync.target import TensorTarget

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]


class Killed(BaseException):
    """The process ends here: no cleanup of ours runs on disk."""


class MortalWriter:
    """Writes `budget` more bytes or file ends, then dies."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget

    def __call__(self, path: Path, chunks: Iterable[Any]) -> int:
        whole = b"".join(bytes(chunk) for chunk in chunks)
        if self.budget is not None:
            if self.budget < len(whole) + 1:
                path.write_bytes(whole[: self.budget])
                raise Killed
            self.budget -= len(whole) + 1
        return write_durably(path, [whole])


def _received(store: Path, version: int, like: State) -> State:
    held = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    Receiver(store).sync(None, WeightVersion(version), TensorTarget(held))
    return held


def test_a_step_costs_a_fraction_of_the_state(published: tuple[Path, list[Published]]) -> None:
    _, done = published
    assert [step.version for step in done] == list(range(1, 9))
    assert [step.is_full for step in done] == [True] + [False] * 7
    assert [step.bytes_anchor > 0 for step in done] == [False] * 4 + [True] + [False] * 3
    assert len({step.state_hash for step in done}) == 8


def test_every_version_is_exact(
    published: tuple[Path, list[Published]], states: tuple[State, ...], same: Same
) -> None:
    store, _ = published
    for version in range(1, 9):
        assert same(_received(store, version, states[0]), states[version - 1])


@pytest.mark.parametrize("encoding", [Encoding.XOR, Encoding.OVERWRITE])
def test_versions_for_other_readers_are_exact(
    tmp_path: Path, states: tuple[State, ...], same: Same, encoding: Encoding
) -> None:
    with Publisher(tmp_path, encoding=encoding) as publisher:
        for state in states[:4]:
            publisher.publish(state)
    assert same(_received(tmp_path, 4, states[0]), states[3])


def test_an_unchanged_state_is_a_version_too(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    with Publisher(tmp_path) as publisher:
        first = publisher.publish(states[0])
        again = publisher.publish(states[0])
    assert (again.version, again.state_hash) == (2, first.state_hash)
    assert again.bytes_sent < 1000
    assert same(_received(tmp_path, 2, states[0]), states[0])


def test_the_callers_tensors_may_change_after_publishing(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    state = {name: tensor.clone() for name, tensor in states[0].items()}
    with Publisher(tmp_path) as publisher:
        publisher.publish(state)
        state["layer.bias"].add_(1.0)
        publisher.publish(state)
    assert same(_received(tmp_path, 1, state), states[0])
    assert same(_received(tmp_path, 2, state), state)


def test_a_new_layout_begins_with_a_full_version(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    with Publisher(tmp_path) as publisher:
        publisher.publish(states[0])
        grown = states[1] | {"head.weight": torch.ones(3, 3)}
        assert publisher.publish(grown).is_full
    assert same(_received(tmp_path, 2, grown), grown)


def test_a_reopened_store_goes_on_with_the_next_number(
    published: tuple[Path, list[Published]], states: tuple[State, ...], same: Same
) -> None:
    store, _ = published
    with Publisher(store) as publisher:
        step = publisher.publish(states[8])
    assert (step.version, step.is_full) == (9, True)
    assert same(_received(store, 8, states[0]), states[7])
    assert same(_received(store, 9, states[0]), states[8])


def test_a_store_has_one_publisher(tmp_path: Path) -> None:
    with Publisher(tmp_path), pytest.raises(ConfigError, match="has a publisher already"):
        Publisher(tmp_path)
    Publisher(tmp_path).close()


def test_old_versions_go_and_kept_ones_stay_exact(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    with Publisher(tmp_path, anchor_every=3, keep_versions=4) as publisher:
        for state in states:
            publisher.publish(state)
    kept = sorted(path.name for path in tmp_path.glob("*_v*"))
    assert kept[0] == "anchor_v000007"
    assert "weight_v000006" not in kept
    for version in range(9, 13):
        assert same(_received(tmp_path, version, states[0]), states[version - 1])


def test_a_kill_at_any_byte_leaves_the_previous_version_whole(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    """A publish that also writes an anchor, killed after every few bytes and at each file's end."""
    writer = MortalWriter(10**9)
    with Publisher(tmp_path / "dry", anchor_every=1, write=writer) as publisher:
        publisher.publish(states[0])
    before = 10**9 - (writer.budget or 0)
    writer.budget = 10**9
    with Publisher(tmp_path / "whole", anchor_every=1, write=writer) as publisher:
        publisher.publish(states[0])
        publisher.publish(states[1])
    total = 10**9 - writer.budget - before
    for budget in sorted({*range(0, total, 101), *range(total - 300, total, 7)}):
        store = tmp_path / f"killed-{budget}"
        writer = MortalWriter(None)
        publisher = Publisher(store, anchor_every=1, write=writer)
        publisher.publish(states[0])
        writer.budget = budget
        with pytest.raises(Killed):
            publisher.publish(states[1])
        publisher.close()
        latest = Receiver(store).latest()
        assert latest in {1, 2}
        assert same(_received(store, latest, states[0]), states[latest - 1])
        with Publisher(store) as successor:
            step = successor.publish(states[2])
        assert step.version > latest
        assert not list(store.glob(".tmp-*"))
        assert same(_received(store, step.version, states[0]), states[2])


def test_a_full_disk_is_exhausted_and_changes_nothing(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    full = False

    def write(path: Path, chunks: Iterable[Any]) -> int:
        if full:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_durably(path, chunks)

    with Publisher(tmp_path, write=write) as publisher:
        publisher.publish(states[0])
        full = True
        with pytest.raises(Exhausted, match="no space left"):
            publisher.publish(states[1])
        assert not list(tmp_path.glob(".tmp-*"))
        full = False
        assert publisher.publish(states[2]).version == 2
    assert same(_received(tmp_path, 2, states[0]), states[2])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"w": torch.zeros(2, dtype=torch.complex64)}, "complex64 cannot be published"),
        ({"layer.lora_A.weight": torch.zeros(2)}, "LoRA"),
        ({"x" * 600: torch.zeros(2)}, "1 to 512 characters"),
        ({"w": torch.zeros(2, device="meta")}, "meta device"),
    ],
)
def test_what_cannot_be_published_says_why(tmp_path: Path, state: State, message: str) -> None:
    with Publisher(tmp_path) as publisher, pytest.raises(Unsupported, match=message):
        publisher.publish(state)


def test_an_empty_state_is_a_mistake(tmp_path: Path) -> None:
    with Publisher(tmp_path) as publisher, pytest.raises(ConfigError, match="empty state dict"):
        publisher.publish({})
