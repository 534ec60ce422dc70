"""Ranks that publish together: one version of all slices, or none."""

import errno
import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import (
    ConfigError,
    Exhausted,
    PeerProtocolError,
    RoseMuxError,
    Stale,
)
from harvester.contracts.ids import WeightVersion
from weightsync.encoding.codec import Encoding
from weightsync.layout.durable import write_durably
from weightsync.publish.agreement import PublishOrder, RankEntries, RankReport, SkippedEntries
from weightsync.publish.directory_writer import FileWriter, WritableDirectory
from weightsync.publish.ranks import RanksByFiles
from weightsync.publish.settings import ExchangeSettings, VersionSettings, WorkSettings
from weightsync.publish.trainer_state import ShardSlice
from weightsync.publisher import Published, Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

State = dict[str, torch.Tensor]
Shares = list[list[tuple[str, torch.Tensor | ShardSlice]]]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]
RANKS = 3


def shares_of(state: State) -> Shares:
    """Rows, uneven columns, two slices of one tensor, a replica, a pipeline stage's own tensors."""
    embed, weight = state["embed.weight"], state["layer.weight"]
    rows = [(0, 17), (17, 34), (34, 50)]
    columns = [(0, 11), (11, 22), (22, 30)]
    shares: Shares = []
    for rank, ((top, bottom), (left, right)) in enumerate(zip(rows, columns, strict=True)):
        middle = (top + bottom) // 2
        shares.append(
            [
                ("embed.weight", ShardSlice(embed[top:middle], (50, 16), 0, top)),
                ("embed.weight", ShardSlice(embed[middle:bottom], (50, 16), 0, middle)),
                ("layer.weight", ShardSlice(weight[:, left:right], (40, 30), 1, left)),
                ("layer.scale", state["layer.scale"]),
            ]
        )
        if rank == 1:
            shares[rank] += [(name, state[name]) for name in ("layer.bias", "steps")]
    return shares


class Crew:
    """The publishers of all ranks, called at once as a trainer's ranks do."""

    def __init__(self, store: Path, write: Mapping[int, FileWriter] | None = None, **options: Any):
        writers = write or {}
        self.publishers = [
            Publisher(
                WritableDirectory(store, write=writers.get(rank, write_durably)),
                rank=rank,
                ranks=RANKS,
                exchange=ExchangeSettings(rank_timeout_s=60.0),
                **options,
            )
            for rank in range(RANKS)
        ]
        self.pool = ThreadPoolExecutor(RANKS)

    def publish(self, shares: Shares, **options: Any) -> list[Published | BaseException]:
        calls = [
            self.pool.submit(publisher.publish, iter(share), **options)
            for publisher, share in zip(self.publishers, shares, strict=True)
        ]
        return [call.exception() or call.result() for call in calls]

    def close(self) -> None:
        self.pool.shutdown()
        for publisher in self.publishers:
            publisher.close()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _received(store: Path, version: int, like: State) -> State:
    held = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    Receiver(store).sync(None, WeightVersion(version), TensorTarget(held))
    return held


def _published(done: list[Published | BaseException]) -> Published:
    """The result on which all ranks agree."""
    found = set()
    for each in done:
        assert isinstance(each, Published), each
        found.add((each.version, each.state_hash, each.bytes_sent, each.is_full, each.bytes_anchor))
    assert len(found) == 1
    assert isinstance(done[0], Published)
    return done[0]


@pytest.mark.parametrize("encoding", [*Encoding][1:])
def test_every_version_of_slices_is_the_whole_model(
    tmp_path: Path, states: tuple[State, ...], same: Same, encoding: Encoding
) -> None:
    with Crew(tmp_path, versions=VersionSettings(anchor_every=3, encoding=encoding)) as crew:
        done = []
        for state in states[:6]:
            done.append(_published(crew.publish(shares_of(state))))
            anchor = tmp_path / f"anchor_v{done[-1].version:06d}"
            assert anchor.exists() == (done[-1].version == 4), "ranks return with their anchor"
    assert [step.is_full for step in done] == [True] + [False] * 5
    assert [step.bytes_anchor > 0 for step in done] == [False, False, False, True, False, False]
    for version in range(1, 7):
        assert same(_received(tmp_path, version, states[0]), states[version - 1])


def test_a_follower_of_slices_ends_on_every_published_state(
    tmp_path: Path, states: tuple[State, ...], blank: State, same: Same
) -> None:
    receiver, current = Receiver(tmp_path), None
    with Crew(tmp_path) as crew:
        for state in states[:5]:
            step = _published(crew.publish(shares_of(state)))
            applied = receiver.sync(current, step.version, TensorTarget(blank))
            assert same(blank, state)
            assert applied.state_hash == step.state_hash
            current = applied.version


def test_each_rank_writes_its_own_slices_and_a_replica_is_written_once(
    tmp_path: Path, states: tuple[State, ...]
) -> None:
    with Crew(tmp_path) as crew:
        for state in states[:2]:
            crew.publish(shares_of(state))
    full = json.loads((tmp_path / "weight_v000001/model.safetensors.index.json").read_bytes())
    shards = full["weight_map"]
    assert shards["embed.weight[0:8, :]"] == "model-00001-of-00003.safetensors"
    assert shards["layer.weight[:, 11:22]"] == "model-00002-of-00003.safetensors"
    assert shards["layer.scale"] == "model-00001-of-00003.safetensors"
    assert full["rosemux"]["slices"]["embed.weight[17:25, :]"] == {
        "tensor": "embed.weight",
        "shape": [50, 16],
        "offsets": [17, 0],
        "lengths": [8, 16],
    }
    sizes = [record["bytes"] for record in full["rosemux"]["files"].values()]
    dense = sum(tensor.nbytes for tensor in states[0].values())
    assert sum(sizes) < dense + 3 * 2000
    delta = json.loads((tmp_path / "weight_v000002/model.safetensors.index.json").read_bytes())
    assert "slices" not in delta["rosemux"]
    assert set(delta["weight_map"].values()) == set(shards.values())


def test_the_hash_of_slices_is_that_of_their_entries(
    tmp_path: Path, states: tuple[State, ...]
) -> None:
    """Two trainers with the same cuts agree; other cuts give the state another hash."""
    with Crew(tmp_path / "a") as a, Crew(tmp_path / "b") as b, Publisher(tmp_path / "c") as whole:
        hashes = {_published(crew.publish(shares_of(states[0]))).state_hash for crew in (a, b)}
        assert len(hashes | {whole.publish(states[0]).state_hash}) == 2


def test_a_missing_slice_publishes_nothing(tmp_path: Path, states: tuple[State, ...]) -> None:
    shares = shares_of(states[0])
    shares[2] = shares[2][1:]
    with Crew(tmp_path) as crew:
        for error in crew.publish(shares):
            assert isinstance(error, ConfigError)
            assert "'embed.weight' do not tile" in str(error)
        assert Receiver(tmp_path).latest() is None
        assert not list(tmp_path.glob("*_v*"))
        _published(crew.publish(shares_of(states[0])))


def test_ranks_that_encode_differently_publish_nothing(
    tmp_path: Path, states: tuple[State, ...]
) -> None:
    with Crew(tmp_path) as crew:
        crew.publishers[1].close()
        crew.publishers[1] = Publisher(
            WritableDirectory(tmp_path),
            rank=1,
            ranks=RANKS,
            versions=VersionSettings(encoding=Encoding.CONTEXT),
        )
        for fault in crew.publish(shares_of(states[0])):
            assert isinstance(fault, ConfigError)
            assert "rank 1 publishes encoding context, rank 0 rosemux" in str(fault)
    assert Receiver(tmp_path).latest() is None


def test_replicas_that_differ_publish_nothing(tmp_path: Path, states: tuple[State, ...]) -> None:
    shares = shares_of(states[0])
    shares[2][3] = ("layer.scale", torch.zeros_like(states[0]["layer.scale"]))
    with Crew(tmp_path) as crew:
        for error in crew.publish(shares):
            assert isinstance(error, ConfigError)
            assert "layer.scale differs between ranks 0 and 2" in str(error)


def test_a_new_layout_fails_on_every_rank_and_is_published_whole_next(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    grown = states[1] | {"head": torch.ones(3)}
    shares = shares_of(states[1])
    shares[1].append(("head", grown["head"]))
    with Crew(tmp_path) as crew:
        crew.publish(shares_of(states[0]))
        for error in crew.publish(shares):
            assert isinstance(error, ConfigError)
            assert "head is new" in str(error)
        assert _published(crew.publish(shares)).is_full
    assert same(_received(tmp_path, 2, grown), grown)


@pytest.mark.parametrize("failing", range(RANKS))
def test_a_full_disk_on_one_rank_leaves_the_version_before(
    tmp_path: Path, states: tuple[State, ...], same: Same, failing: int
) -> None:
    full = False

    def write(path: Path, chunks: Iterable[Any]) -> int:
        if full:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_durably(path, chunks)

    with Crew(tmp_path, {failing: write}) as crew:
        _published(crew.publish(shares_of(states[0])))
        full = True
        for error in crew.publish(shares_of(states[1])):
            assert isinstance(error, Exhausted)
            assert "no space left" in str(error)
        assert same(_received(tmp_path, 1, states[0]), states[0])
        full = False
        step = _published(crew.publish(shares_of(states[2])))
    assert (step.version, step.is_full) == (2, False)
    assert not list(tmp_path.glob(".tmp-*"))
    assert same(_received(tmp_path, 2, states[0]), states[2])


class Killed(BaseException):
    """The rank's process ends here, without further cleanup."""


class Impatience:
    """Real time, two hundred times as fast once a rank has died."""

    def __init__(self) -> None:
        self._real = MonotonicClock()
        self._died_at: float | None = None

    def now(self) -> float:
        now = self._real.now()
        return now if self._died_at is None else now + 199 * (now - self._died_at)

    def hurry(self) -> None:
        self._died_at = self._real.now()


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_rank_killed_at_any_byte_leaves_the_version_before(
    tmp_path: Path, states: tuple[State, ...], same: Same, victim: int
) -> None:
    """The other ranks time out; the store is left unchanged."""
    killed = []
    for budget in (*range(0, 1800 if victim == 0 else 600, 180), 10**6):
        store = tmp_path / f"killed-{victim}-{budget}"
        left = 10**9
        clock = Impatience()

        def write(path: Path, chunks: Iterable[Any], clock: Impatience = clock) -> int:
            nonlocal left
            whole = b"".join(bytes(chunk) for chunk in chunks)
            if left < len(whole) + 1:
                path.write_bytes(whole[:left])
                clock.hurry()
                raise Killed
            left -= len(whole) + 1
            return write_durably(path, [whole])

        with Crew(store, {victim: write}, work=WorkSettings(clock=clock)) as crew:
            _published(crew.publish(shares_of(states[0])))
            left = budget
            done = crew.publish(shares_of(states[1]))
        latest = Receiver(store).latest()
        assert latest in {1, 2}
        killed.append(isinstance(done[victim], Killed))
        if killed[-1]:
            others = [each for rank, each in enumerate(done) if rank != victim]
            named = re.compile(rf"rank (\d+, )*{victim}\b")
            assert all(named.search(str(each)) for each in others), others
        assert same(_received(store, latest, states[0]), states[latest - 1])
        with Crew(store) as successors:
            step = _published(successors.publish(shares_of(states[2])))
        assert not list(store.glob(".tmp-*"))
        assert same(_received(store, step.version, states[0]), states[2])
    assert killed.index(False) > 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_it_writes_an_anchor_does_not_take_the_version_back(
    tmp_path: Path, states: tuple[State, ...], same: Same, victim: int
) -> None:
    clock = Impatience()

    def write(path: Path, chunks: Iterable[Any]) -> int:
        if path.parent.name.startswith(".tmp-anchor"):
            clock.hurry()
            raise Killed
        return write_durably(path, chunks)

    with Crew(
        tmp_path,
        {victim: write},
        work=WorkSettings(clock=clock),
        versions=VersionSettings(anchor_every=1),
    ) as crew:
        crew.publish(shares_of(states[0]))
        done = crew.publish(shares_of(states[1]))
    assert isinstance(done.pop(victim), Killed)
    for each in done:
        assert isinstance(each, Published), each
        assert (each.version, each.bytes_anchor) == (2, 0)
        assert each.anchor_fault.startswith("version 2 has no anchor") or victim == 0
    assert same(_received(tmp_path, 2, states[0]), states[1])


def test_parts_of_two_steps_never_meet(tmp_path: Path, states: tuple[State, ...]) -> None:
    """Rank 2 is one step behind; no checksum could tell its slices from the right ones."""
    with Crew(tmp_path) as crew:
        first, second, third = crew.publishers
        late, now = shares_of(states[0]), shares_of(states[1])
        with ThreadPoolExecutor(RANKS) as pool:
            behind = pool.submit(third.publish, iter(late[2]), step=7)
            others = [
                pool.submit(each.publish, iter(share), step=8)
                for each, share in zip((first, second), now, strict=False)
            ]
            with pytest.raises(Stale, match="rank 2 is at step 7"):
                behind.result()
            assert third.publish(iter(now[2]), step=8) is not None
            assert {each.result().version for each in others} == {1}


def test_ranks_go_on_with_their_mapped_copies(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    store, copies = tmp_path / "store", tmp_path / "copies"
    for version, state in enumerate(states[:3], 1):
        with Crew(store, work=WorkSettings(copy_dir=copies)) as crew:
            step = _published(crew.publish(shares_of(state)))
        assert (step.version, step.is_full) == (version, version == 1)
        assert same(_received(store, version, states[0]), state)
    (copies / "copy-00001.json").unlink()
    with Crew(store, work=WorkSettings(copy_dir=copies)) as crew:
        assert _published(crew.publish(shares_of(states[3]))).is_full, "one copy is not enough"
    assert same(_received(store, 4, states[0]), states[3])


def test_slices_need_all_ranks(tmp_path: Path, states: tuple[State, ...]) -> None:
    with Publisher(tmp_path) as publisher, pytest.raises(ConfigError, match="every rank"):
        publisher.publish(iter(shares_of(states[0])[0]))


@pytest.mark.parametrize("directory", ["../elsewhere", ".tmp-../elsewhere", "weight_v000001", ""])
def test_a_rank_writes_only_where_a_version_is_begun(tmp_path: Path, directory: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    first = RanksByFiles(tmp_path / "store", rank=0, ranks=2, timeout_s=60.0)

    def ordered() -> None:
        with first.exchange(1) as talk:
            talk.gather(RankReport(0, ""))
            talk.tell(PublishOrder(1, 0, directory), PublishOrder)
            talk.gather(RankEntries({}, {}))
            talk.tell(SkippedEntries([[], []]), SkippedEntries)

    with (
        Publisher(tmp_path / "store", rank=1, ranks=2) as publisher,
        ThreadPoolExecutor(1) as pool,
    ):
        talk = pool.submit(ordered)
        with pytest.raises(PeerProtocolError, match="not a draft directory of this store"):
            publisher.publish({"w": torch.ones(3)})
        assert isinstance(talk.exception(), RoseMuxError)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_index_that_describes_no_grid_is_refused(
    tmp_path: Path, states: tuple[State, ...], blank: State
) -> None:
    with Crew(tmp_path) as crew:
        _published(crew.publish(shares_of(states[0])))
    path = tmp_path / "weight_v000001/model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    index["rosemux"]["slices"]["embed.weight[0:8, :]"]["offsets"] = [42, 0]
    path.write_text(json.dumps(index))
    with pytest.raises(RoseMuxError, match="do not tile"):
        Receiver(tmp_path).sync(None, WeightVersion(1), TensorTarget(blank))
    assert all(not tensor.float().any() for tensor in blank.values())
