"""Publishing: versions appear whole or not at all, and numbers are never used twice."""

import errno
import inspect
import math
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harvester.contracts.errors import ConfigError, Exhausted, Unsupported
from harvester.contracts.ids import WeightVersion
from weightsync import publisher as publisher_module
from weightsync.encoding.codec import Encoding
from weightsync.follower import Follower
from weightsync.layout.durable import write_durably
from weightsync.publish.directory_writer import DirectoryWriter, WritableDirectory
from weightsync.publish.settings import (
    AnnounceSettings,
    ExchangeSettings,
    VersionSettings,
    WorkSettings,
)
from weightsync.publisher import Published, Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.transport.location import StoreRoot

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]


class Killed(BaseException):
    """The process ends here, without any cleanup on disk."""


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
    held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    Receiver(store).sync(None, WeightVersion(version), TensorTarget(held))
    return held


def test_a_full_version_is_published_before_its_loops_are_compiled(
    tmp_path: Path,
    states: tuple[State, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled = threading.Event()

    def compile_slowly(widths: set[int]) -> None:
        assert widths == {1, 2, 4, 8}
        assert compiled.wait(60)

    def compile_once_it_is_said() -> None:
        while "being compiled" not in caplog.text and not compiled.wait(0.01):
            pass
        compiled.set()

    monkeypatch.setattr(publisher_module, "warm_up", compile_slowly)
    monkeypatch.setattr(publisher_module, "_SILENT_S", 0.01)
    with Publisher(tmp_path / "store") as publisher:
        assert publisher.publish(states[0]).version == 1
        assert Receiver(tmp_path / "store").latest() == 1
        compiling = threading.Thread(target=compile_once_it_is_said)
        compiling.start()
        try:
            assert publisher.publish(states[1]).version == 2
            assert compiled.is_set()
        finally:
            compiled.set()
            compiling.join()
    assert "being compiled" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name_where_they_are_checked(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    state = {"a": torch.ones(9, dtype=dtype), "steps": torch.ones(1, dtype=torch.int64)}
    state["nothing"] = torch.ones(0)
    wrong = {**state, "a": torch.tensor([1.0] * 8 + [value]).to(dtype)}
    with Publisher(tmp_path / "store", versions=VersionSettings(check_finite=True)) as publisher:
        for version in (1, 2):
            with pytest.raises(ConfigError, match="a has NaN or infinite elements"):
                publisher.publish(wrong)
            assert publisher.publish(state).version == version
    with Publisher(tmp_path / "other") as publisher:
        publisher.publish(wrong)


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
    with Publisher(tmp_path, versions=VersionSettings(encoding=encoding)) as publisher:
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
    with Publisher(
        tmp_path, versions=VersionSettings(anchor_every=3, keep_versions=4)
    ) as publisher:
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
    """A publish of several files that also writes an anchor, killed after every few bytes and at
    each file's end; the next publisher takes over the mapped copy.
    """
    writer = MortalWriter(10**9)
    with Publisher(
        WritableDirectory(tmp_path / "dry", write=writer),
        versions=VersionSettings(anchor_every=1),
        work=WorkSettings(shard_bytes=200),
    ) as publisher:
        publisher.publish(states[0])
    before = 10**9 - (writer.budget or 0)
    writer.budget = 10**9
    with Publisher(
        WritableDirectory(tmp_path / "whole", write=writer),
        versions=VersionSettings(anchor_every=1),
        work=WorkSettings(shard_bytes=200),
    ) as publisher:
        publisher.publish(states[0])
        publisher.publish(states[1])
    total = 10**9 - writer.budget - before
    for budget in sorted({*range(0, total, 101), *range(total - 300, total, 7)}):
        store = tmp_path / f"killed-{budget}"
        writer = MortalWriter(None)
        copy = tmp_path / f"copy-{budget}"
        publisher = Publisher(
            WritableDirectory(store, write=writer),
            versions=VersionSettings(anchor_every=1),
            work=WorkSettings(shard_bytes=200, copy_dir=copy),
        )
        publisher.publish(states[0])
        writer.budget = budget
        with pytest.raises(Killed), publisher:
            publisher.publish(states[1])
        latest = Receiver(store).latest()
        assert latest in {1, 2}
        assert same(_received(store, latest, states[0]), states[latest - 1])
        with Publisher(store, work=WorkSettings(copy_dir=copy)) as successor:
            step = successor.publish(states[2])
        assert step.version > latest
        assert not step.is_full, "neither version 1 nor 2 was published without its copy"
        assert not list(store.glob(".tmp-*"))
        assert same(_received(store, step.version, states[0]), states[2])


def test_named_parameters_are_published_as_a_state_dict_is(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    """In any order, from one buffer that is filled again and again."""

    def gathered(state: State) -> Iterator[tuple[str, torch.Tensor]]:
        for name in reversed(state):
            buffer = state[name].clone()
            yield name, buffer
            buffer.zero_()

    with Publisher(tmp_path / "a") as publisher, Publisher(tmp_path / "b") as other:
        for state in states[:4]:
            taken = publisher.publish(gathered(state))
            assert taken.state_hash == other.publish(state).state_hash
    for version in (1, 4):
        assert same(_received(tmp_path / "a", version, states[0]), states[version - 1])
    one, two = (tmp_path / store / "weight_v000001" for store in "ab")
    assert {f.name: f.read_bytes() for f in one.iterdir()} == {
        f.name: f.read_bytes() for f in two.iterdir()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": torch.ones(3)}, "head is new or has another"),
        ({"steps": torch.ones(2)}, "steps is new or has another"),
        ({"steps": None}, "steps is missing"),
    ],
)
def test_named_parameters_of_another_layout_are_refused_once(
    tmp_path: Path,
    states: tuple[State, ...],
    same: Same,
    change: dict[str, torch.Tensor | None],
    message: str,
) -> None:
    other = {k: v for k, v in (states[1] | change).items() if v is not None}
    with Publisher(tmp_path) as publisher:
        publisher.publish(iter(states[0].items()))
        with pytest.raises(ConfigError, match=message):
            publisher.publish(iter(other.items()))
        assert publisher.publish(iter(other.items())).is_full
    assert same(_received(tmp_path, 2, other), other)


def test_a_name_that_comes_twice_is_a_mistake(tmp_path: Path, states: tuple[State, ...]) -> None:
    twice = [*states[0].items(), *states[0].items()]
    with Publisher(tmp_path) as publisher:
        with pytest.raises(ConfigError, match=r"embed\.weight is given twice"):
            publisher.publish(iter(twice))
        publisher.publish(states[0])
        with pytest.raises(ConfigError, match=r"embed\.weight is given twice"):
            publisher.publish(iter(twice))
        assert publisher.publish(states[1]).version == 2


def test_tensors_that_are_no_memory_of_their_own_are_exact(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    """Tied, transposed, sliced and empty ones."""
    with Publisher(tmp_path) as publisher:
        for state in states[:3]:
            weight = state["layer.weight"]
            odd = {"a": weight, "b": weight, "t": weight.t(), "s": weight[:, ::2]}
            odd["none"] = torch.zeros(0, 3)
            step = publisher.publish(odd)
            plain = {name: tensor.contiguous() for name, tensor in odd.items()}
            assert same(_received(tmp_path, step.version, odd), plain)
    assert not step.is_full


def test_names_that_are_tied_no_more_begin_with_a_full_version(tmp_path: Path, same: Same) -> None:
    weight = torch.ones(40)
    with Publisher(tmp_path) as publisher:
        publisher.publish({"embed": weight, "head": weight})
        assert not publisher.publish({"embed": weight, "head": weight}).is_full
        apart = {"embed": weight, "head": torch.zeros(40)}
        assert publisher.publish(apart).is_full
    assert same(_received(tmp_path, 3, apart), apart)


def test_a_large_delta_is_several_files(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    with Publisher(tmp_path, work=WorkSettings(shard_bytes=100, in_flight_bytes=1)) as publisher:
        for state in states[:3]:
            publisher.publish(state)
    shards = sorted(path.name for path in (tmp_path / "weight_v000003").glob("*.safetensors"))
    assert len(shards) > 1
    count = len(shards)
    assert shards == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert same(_received(tmp_path, 3, states[0]), states[2])


def test_a_number_is_not_used_again_where_the_newest_versions_were_deleted(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    with Publisher(tmp_path) as publisher:
        for state in states[:3]:
            publisher.publish(state)
    for lost in ("weight_v000002", "weight_v000003"):
        shutil.rmtree(tmp_path / lost)
    with Publisher(tmp_path) as publisher:
        assert publisher.publish(states[3]).version == 4
    assert same(_received(tmp_path, 4, states[0]), states[3])


def test_a_full_checkpoint_that_was_deleted_is_made_again_and_no_chain_begins_with_it(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    settings = VersionSettings(anchor_every=4, keep_versions=2, skip_deltas=False)

    def anchors() -> set[str]:
        return {path.name for path in tmp_path.glob("anchor_*")}

    with Publisher(tmp_path, versions=settings) as publisher:
        for state in states[:6]:
            publisher.publish(state)
        assert anchors() == {"anchor_v000005"}
        shutil.rmtree(tmp_path / "anchor_v000005")
        publisher.publish(states[6])
        assert (tmp_path / "weight_v000005").exists(), "nothing is left to begin with"
        publisher.publish(states[7])
    assert anchors() == {"anchor_v000008"}
    assert same(_received(tmp_path, 8, states[0]), states[7])


@pytest.mark.parametrize("lost", ["weight_v000001", "weight_v000002", "weight_v000003"])
def test_a_chain_of_which_a_version_was_deleted_is_replaced_by_an_anchor(
    tmp_path: Path, states: tuple[State, ...], same: Same, lost: str
) -> None:
    """Otherwise no new receiver reaches a version until the next anchor is due, 25 later."""
    with Publisher(tmp_path) as publisher:
        for state in states[:3]:
            publisher.publish(state)
        shutil.rmtree(tmp_path / lost)
        anchors = [publisher.publish(state).bytes_anchor for state in states[3:6]]
    assert [anchor > 0 for anchor in anchors] == [False, True, False]
    for version in (5, 6):
        assert same(_received(tmp_path, version, states[0]), states[version - 1])


@pytest.mark.parametrize("last", ["LATEST", "weight_v999999999999999"])
def test_a_store_without_another_number_is_refused(tmp_path: Path, last: str) -> None:
    with Publisher(tmp_path) as publisher:
        publisher.publish({"w": torch.ones(2)})
    if last == "LATEST":
        (tmp_path / last).write_text("weight_v999999999999999\n")
    else:
        (tmp_path / last).mkdir()
    for _ in range(2):
        with pytest.raises(ConfigError, match="has a version 999999999999999: numbers end there"):
            Publisher(tmp_path)


@pytest.mark.parametrize("stray", ["a file", "a dead link"])
def test_a_stray_file_with_a_version_s_name_stops_no_publish(
    tmp_path: Path, states: tuple[State, ...], same: Same, stray: str
) -> None:
    with Publisher(tmp_path, versions=VersionSettings(max_bytes=1 << 30)) as publisher:
        publisher.publish(states[0])
        path = tmp_path / "weight_v000009"
        path.write_text("x") if stray == "a file" else path.symlink_to("nowhere")
        assert publisher.publish(states[1]).version == 2
    assert same(_received(tmp_path, 2, states[0]), states[1])


def _store_bytes(store: Path) -> int:
    while True:
        # An anchor's directory gets its name beside the next step.
        with suppress(FileNotFoundError):
            return sum(f.stat().st_size for path in store.glob("*_v*") for f in path.iterdir())


def test_a_quota_prunes_further_back_and_never_what_is_needed(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    with Publisher(tmp_path / "free") as publisher:
        publisher.publish(states[0])
    full = _store_bytes(tmp_path / "free")
    limit = 3 * full
    with Publisher(
        tmp_path / "store", versions=VersionSettings(anchor_every=3, max_bytes=limit)
    ) as publisher:
        for number, state in enumerate(states, 1):
            assert not publisher.publish(state).anchor_fault
            assert same(_received(tmp_path / "store", number, states[0]), state)
            assert _store_bytes(tmp_path / "store") <= limit
    assert _store_bytes(tmp_path / "store") <= limit
    kept = {path.name for path in (tmp_path / "store").glob("*_v*")}
    assert "weight_v000001" not in kept


def test_a_quota_that_is_too_small_changes_nothing(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    with Publisher(tmp_path / "free") as publisher:
        publisher.publish(states[0])
    limit = _store_bytes(tmp_path / "free") + 200
    store = tmp_path / "store"
    with Publisher(store, versions=VersionSettings(max_bytes=limit)) as publisher:
        publisher.publish(states[0])
        before = {path.name: path.stat().st_mtime_ns for path in store.glob("*_v*")}
        with pytest.raises(Exhausted, match="max_bytes="):
            publisher.publish(states[1])
        assert {path.name: path.stat().st_mtime_ns for path in store.glob("*_v*")} == before
        assert not list(store.glob(".tmp-*"))
        assert Receiver(store).latest() == 1
    with Publisher(store, versions=VersionSettings(max_bytes=3 * limit)) as publisher:
        assert publisher.publish(states[2]).version == 2
    assert same(_received(store, 2, states[0]), states[2])


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (VersionSettings, {"anchor_every": 0}),
        (VersionSettings, {"anchor_every": 26}),
        (VersionSettings, {"keep_versions": 0}),
        (WorkSettings, {"threads": 0}),
        (VersionSettings, {"encoding": Encoding.DENSE}),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    settings: type[Any], options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        settings(**options)


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_of_the_ranks_is_refused(tmp_path: Path, rank: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} of ranks={ranks}"):
        Publisher(tmp_path, rank=rank, ranks=ranks)


@pytest.mark.parametrize("announce", ["", (), AnnounceSettings(""), AnnounceSettings([])])
def test_a_publisher_without_gateways_announces_to_none(tmp_path: Path, announce: Any) -> None:
    with Publisher(tmp_path, announce=announce) as publisher:
        assert publisher.announced(0.0) == "served"
        assert publisher.announce_faults == {}


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8300/v1/jobs/a",
        "ftp://g/v1/jobs/a",
        "http:///v1/jobs/a",
        "http://g:99999/v1/jobs/a",
        "http://a b/v1/jobs/a",
        "http://g/v1/jobs/",
        "http://g/v1/jobs/a/versions",
        "http://g/v1/jobs/a?x=1",
        "http://g/v2/jobs/a",
    ],
)
def test_a_url_that_is_no_jobs_at_a_gateway_is_refused_at_once(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"announce: .*http://127\.0\.0\.1:8300/v1/jobs/JOB"):
        Publisher(tmp_path / "store", announce=url)


def test_a_publisher_has_eight_parameters() -> None:
    assert [*inspect.signature(Publisher).parameters] == [
        "store",
        "rank",
        "ranks",
        "adapter",
        "announce",
        "versions",
        "work",
        "exchange",
    ]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "cannot publish a NoneType: pass a state dict"),
        ([torch.zeros(2, 3)], "a Tensor is no pair of name and tensor"),
        (torch.nn.Linear(2, 2).parameters(), r"a Parameter is no pair .*`named_parameters\(\)`"),
        ([("w", torch.zeros(2), 1)], "a tuple is no pair of name and tensor"),
    ],
)
def test_a_state_without_names_is_refused(tmp_path: Path, state: Any, message: str) -> None:
    with Publisher(tmp_path) as publisher, pytest.raises(ConfigError, match=message):
        publisher.publish(state)


def test_a_full_disk_is_exhausted_and_changes_nothing(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    full = False

    def write(path: Path, chunks: Iterable[Any]) -> int:
        if full:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_durably(path, chunks)

    with Publisher(WritableDirectory(tmp_path, write=write)) as publisher:
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
        ({"w": torch.zeros(2, dtype=torch.complex128)}, "complex128 cannot be published"),
        ({"layer.lora_A.weight": torch.zeros(2)}, "LoRA"),
        ({"x" * 600: torch.zeros(2)}, "1 to 512 characters"),
        ({"w": torch.zeros(2, device="meta")}, "meta device"),
        ({"rosemux.packed": torch.zeros(2)}, "the name is reserved for headers"),
        ({"w\ud800": torch.zeros(2)}, "1 to 512 characters"),
        ({7: torch.zeros(2)}, "names are strings"),
        ({"w": torch.eye(2).to_sparse()}, "publish it dense"),
    ],
)
def test_an_unpublishable_tensor_is_refused(tmp_path: Path, state: State, message: str) -> None:
    with Publisher(tmp_path) as publisher, pytest.raises(Unsupported, match=message):
        publisher.publish(state)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("empty", [{}, ()])
def test_an_empty_state_is_a_mistake_however_often_it_is_published(
    tmp_path: Path, empty: State, *, before: bool
) -> None:
    """A generator that was read before is empty when a trainer tries again."""
    with Publisher(tmp_path) as publisher:
        if before:
            publisher.publish({"w": torch.zeros(2)})
            with pytest.raises(ConfigError, match=r"w is missing|no tensor"):
                publisher.publish(empty)
        for _ in range(2):
            with pytest.raises(ConfigError, match="no tensor to publish"):
                publisher.publish(empty)
        assert publisher.publish({"w": torch.ones(2)}).version == 1 + before


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (VersionSettings, {"encoding": "foo"}, "encoding 'foo': use rosemux, context"),
        (VersionSettings, {"encoding": []}, r"encoding \[\]: use rosemux"),
        (ExchangeSettings, {"rank_timeout_s": math.nan}, "rank_timeout_s nan"),
        (ExchangeSettings, {"rank_timeout_s": -1.0}, "rank_timeout_s -1"),
        (VersionSettings, {"max_bytes": -1}, "max_bytes -1: use a number from 1"),
        (VersionSettings, {"max_bytes": math.nan}, "max_bytes nan: use a number from 1"),
        (WorkSettings, {"in_flight_bytes": 0}, "in_flight_bytes 0: use a number from 1"),
        (WorkSettings, {"shard_bytes": 0}, "shard_bytes 0: use a number from 1"),
        (VersionSettings, {"keep_versions": math.nan}, "keep_versions nan: use a number from 1"),
        (VersionSettings, {"anchor_every": 2.5}, "anchor_every 2.5: use a whole number from"),
        (VersionSettings, {"anchor_every": "10"}, "anchor_every '10': use a whole number from 1"),
        (VersionSettings, {"first_version": 1.0}, "first_version 1.0: use a whole number from 1"),
        (WorkSettings, {"clock": 3}, "clock 3: give a clock"),
        (Publisher.Announce, {"jobs": (), "token_file": 3}, "token_file 3: give a file"),
        (WorkSettings, {"threads": "2"}, "threads '2'"),
        (WorkSettings, {"shard_bytes": None}, "shard_bytes None: use a number from 1"),
        (WorkSettings, {"copy_dir": 3}, "copy_dir 3: give a directory"),
        (VersionSettings, {"keep_versions": None}, "keep_versions None: use a number from 1"),
        (VersionSettings, {"skip_deltas": "no"}, "skip_deltas 'no': use True or False"),
        (VersionSettings, {"check_finite": None}, "check_finite None: use True or False"),
        (ExchangeSettings, {"ranks_dir": 3}, "ranks_dir 3: give a directory"),
        (Publisher.Announce, {"jobs": None}, "jobs None: give announce the job's URL"),
        (Publisher.Announce, {"jobs": b"http"}, "jobs b'http'"),
        (Publisher.Announce, {"jobs": ["http://g/v1/jobs/a", 3]}, "announce: 3 is no job's URL"),
        (ExchangeSettings, {"rank_timeout_s": "60"}, "rank_timeout_s '60'"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused_at_once(
    settings: type[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"versions": {"anchor_every": 10}}, r"versions: use Publisher\.Versions\("),
        ({"work": Publisher.Versions()}, r"work: use Publisher\.Work\("),
        ({"exchange": None}, r"exchange: use Publisher\.Exchange\("),
        ({"adapter": {"r": 8}}, r"adapter \{'r': 8\}: use Adapter\(base, config\)"),
        ({"rank": "0"}, "rank '0' of ranks=1"),
        ({"ranks": 2.0}, "rank 0 of ranks=2.0"),
    ],
)
def test_settings_of_another_kind_are_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Publisher(tmp_path / "store", **given)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("store", [3, None, b"/srv/weights"])
def test_a_store_that_is_no_location_is_refused(store: Any) -> None:
    for opened in (Publisher, Receiver):
        with pytest.raises(ConfigError, match=f"store {store!r}: give its directory or URL"):
            opened(store)


def test_settings_take_the_whole_numbers_of_numpy(tmp_path: Path) -> None:
    five = np.int64(5)
    settings = VersionSettings(anchor_every=five, keep_versions=five, first_version=five)  # type: ignore[arg-type]
    with Publisher(tmp_path, versions=settings) as publisher:
        assert repr(publisher.publish({"w": torch.ones(2)}).version) == "5"


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    with Publisher("~/job-a", work=WorkSettings(copy_dir="~/copies")) as publisher:
        publisher.publish({"w": torch.ones(2)})
    with Follower(Receiver("~/job-a"), Path("~/policy")) as follower:
        follower.pull()
    assert {path.name for path in home.iterdir()} == {"job-a", "copies", "policy"}
    assert StoreRoot("~").names() == ("copies", "job-a", "policy")
    assert not [*elsewhere.iterdir()]
    with pytest.raises(ConfigError, match="~nobody-by-this-name/x: "):
        Publisher("~nobody-by-this-name/x")


@pytest.mark.parametrize("part", ["store", "copies", "ranks"])
def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, part: str) -> None:
    places = {name: tmp_path / name for name in ("store", "copies", "ranks")}
    places[part].write_text("a file")
    settings: dict[str, Any] = {
        "work": WorkSettings(copy_dir=places["copies"]),
        "exchange": ExchangeSettings(ranks_dir=places["ranks"]),
        "ranks": 2,
    }
    with pytest.raises(ConfigError, match=f"cannot write to {places[part]}") as refused:
        Publisher(places["store"], **settings)
    places[part].unlink()
    # The store is free again, although the error and what it refers to are still there.
    Publisher(places["store"], **settings).close()
    assert refused.value


@pytest.mark.parametrize("step", [-1, 0.5, math.nan, "x"])
def test_a_step_that_is_no_number_of_steps_is_refused(tmp_path: Path, step: Any) -> None:
    with Publisher(tmp_path) as publisher, pytest.raises(ConfigError, match="step number"):
        publisher.publish({"w": torch.zeros(2)}, step=step)


@pytest.mark.parametrize("encoding", [Encoding.ROSEMUX, Encoding.XOR])
def test_a_model_of_very_many_tensors_has_files_that_readers_take(
    tmp_path: Path, same: Same, encoding: Encoding
) -> None:
    """Headers of one file for all of them would be over 32 MiB, which is no safetensors file."""
    values = torch.zeros(34_000)
    state = {f"{number:06d}{'x' * 490}": values[number : number + 1] for number in range(34_000)}
    store = tmp_path / "store"
    with Publisher(store, versions=VersionSettings(encoding=encoding)) as publisher:
        publisher.publish(state)
        values += 1
        publisher.publish(state)
    assert same(_received(store, 2, state), state)
    with Follower(Receiver(store), tmp_path / "held") as follower:
        assert follower.pull().tensors_written == len(state)


def test_an_empty_location_is_no_store(tmp_path: Path) -> None:
    for opened in (Publisher, Receiver, StoreRoot):
        with pytest.raises(ConfigError, match="an empty location"):
            opened("")
    with pytest.raises(ConfigError, match="an empty location"):
        Publisher(tmp_path / "store", work=WorkSettings(copy_dir=""))


@pytest.mark.parametrize("torn", [b"", b"weight_v0", b"\xff\x00 no name"])
def test_a_torn_pointer_is_mended_by_the_next_version(
    tmp_path: Path, states: tuple[State, ...], same: Same, torn: bytes
) -> None:
    store = tmp_path / "store"
    with Publisher(store) as publisher:
        publisher.publish(states[0])
    (store / "LATEST").write_bytes(torn)
    with Publisher(store) as publisher:
        published = publisher.publish(states[1])
        assert published.version == 2
        (store / "LATEST").write_bytes(torn)
        assert publisher.publish(states[2]).version == 3
    assert same(_received(store, 3, states[0]), states[2])


def test_a_torn_pointer_stops_no_publisher_with_a_quota(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    store = tmp_path / "store"
    with Publisher(store) as publisher:
        publisher.publish(states[0])
        publisher.publish(states[1])
    (store / "LATEST").write_bytes(b"weig")
    with Publisher(store, versions=VersionSettings(max_bytes=_store_bytes(store) * 4)) as publisher:
        step = publisher.publish(states[2])
    assert (step.version, step.is_full) == (3, True)
    assert same(_received(store, 3, states[0]), states[2])


def test_a_version_is_published_though_old_ones_cannot_be_deleted_now(
    tmp_path: Path, states: tuple[State, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise ConfigError("busy")

    store = tmp_path / "store"
    with Publisher(store, versions=VersionSettings(keep_versions=1, anchor_every=1)) as publisher:
        publisher.publish(states[0])
        monkeypatch.setattr(DirectoryWriter, "remove", busy)
        assert publisher.publish(states[1]).version == 2
        monkeypatch.undo()
        assert publisher.publish(states[2]).version == 3
    assert not (store / "weight_v000001").exists()


def test_tied_names_that_come_one_by_one_begin_a_full_version(tmp_path: Path) -> None:
    weight = torch.arange(64.0)
    state = {"embed": weight, "head": weight}
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish(state)
        with pytest.raises(ConfigError, match="publish all of it again"):
            publisher.publish(iter(state.items()))
        step = publisher.publish(iter(state.items()))
    assert (step.version, step.is_full) == (2, True)


def test_the_older_of_two_publishers_with_separate_locks_stops(
    tmp_path: Path, states: tuple[State, ...], same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    store = tmp_path / "store"
    with Publisher(store) as older:
        older.publish(states[0])
        with Publisher(store) as newer:
            begun = store / ".tmp-weight_v000009-abcd"
            begun.mkdir()
            for _ in range(2):
                with pytest.raises(ConfigError, match="another publisher"):
                    older.publish(states[1])
            assert begun.exists(), "the older one leaves alone what the newer one has begun"
            published = newer.publish(states[2])
    assert sorted(path.name for path in store.glob("weight_*")) == [
        "weight_v000001",
        f"weight_v{published.version:06d}",
    ]
    assert same(_received(store, published.version, states[2]), states[2])


@pytest.mark.parametrize("stalls", ["before it is written", "before the look", "after the look"])
def test_a_publisher_that_stalls_does_not_set_latest_back(
    tmp_path: Path, states: tuple[State, ...], monkeypatch: pytest.MonkeyPatch, stalls: str
) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    newest: list[WeightVersion] = []
    stalled: list[str] = []

    def stall(at: str) -> None:
        if at == stalls and len(written) == 2 and not stalled:
            stalled.append(at)
            with Publisher(tmp_path / "store") as newer:
                newest.append(newer.publish(states[2]).version)

    def write(path: Path, chunks: Iterable[Any]) -> int:
        is_latest = "LATEST" in path.name
        if is_latest:
            written.append(path)
            stall("before it is written")
        size = write_durably(path, chunks)
        if is_latest:
            stall("before the look")
        return size

    written: list[Path] = []
    is_owner = DirectoryWriter._is_owner

    def looked(writer: DirectoryWriter) -> bool:
        found = is_owner(writer)
        stall("after the look")
        return found

    older = Publisher(WritableDirectory(tmp_path / "store", write=write))
    older.publish(states[0])
    monkeypatch.setattr(DirectoryWriter, "_is_owner", looked)
    with pytest.raises(ConfigError, match="another publisher"):
        older.publish(states[1])
    assert newest == [Receiver(tmp_path / "store").latest()]
    assert not [*(tmp_path / "store").glob(".tmp-*")]


def test_a_publisher_that_ended_leaves_its_store_to_the_next(
    tmp_path: Path, states: tuple[State, ...]
) -> None:
    for number, state in enumerate(states[:3], start=1):
        with Publisher(tmp_path / "store") as publisher:
            assert publisher.publish(state).version == number


def test_a_closed_publisher_publishes_nothing(tmp_path: Path) -> None:
    with Publisher(tmp_path / "job.store") as publisher:
        publisher.publish({"a": torch.ones(3)})
    with pytest.raises(ConfigError, match="closed"):
        publisher.publish({"a": torch.ones(3)})


def test_a_job_goes_on_in_another_store_above_its_last_version(tmp_path: Path) -> None:
    for expected in (41, 42):
        with Publisher(tmp_path / "new", versions=VersionSettings(first_version=41)) as publisher:
            published = publisher.publish({"w": torch.full((8,), float(expected))})
            assert (published.version, published.is_full) == (expected, True)
    held = {"w": torch.zeros(8)}
    receiver = Receiver(tmp_path / "new")
    receiver.sync(None, WeightVersion(42), TensorTarget(held))
    assert held["w"].tolist() == [42.0] * 8
    with pytest.raises(ConfigError, match="first_version 0"):
        Publisher(tmp_path / "other", versions=VersionSettings(first_version=0))
