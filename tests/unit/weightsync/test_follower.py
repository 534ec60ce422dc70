"""A checkpoint directory that follows a store: a version is claimed only while it is there."""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harvester.contracts.errors import ConfigError, Corrupt, Exhausted, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Bits
from weightsync.encoding.codec import Encoding
from weightsync.follower import Follower
from weightsync.layout import durable
from weightsync.layout.apply_journal import Applying, ApplyRecord, Held, read_record
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Published, Publisher
from weightsync.receive import checkpoint_directory
from weightsync.receive.checkpoint import Checkpoint
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.transport.directory import DirectorySource

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]
Store = tuple[Path, list[Published]]
SHARD = "model-00001-of-00001.safetensors"
THREE, SEVEN, EIGHT = (WeightVersion(v) for v in (3, 7, 8))


class Killed(BaseException):
    """The process ends here."""


class _Raced(DirectorySource):
    """Calls `race` once, before the first read of a file whose path begins so."""

    def __init__(self, root: Path, begin: str) -> None:
        super().__init__(root)
        self._begin = begin
        self.race: Callable[[], object] | None = None

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        self._race(path)
        return super().read_small(path, limit_bytes)

    def read_range(self, path: str, start: int, into: memoryview) -> None:
        self._race(path)
        super().read_range(path, start, into)

    def _race(self, path: str) -> None:
        if self.race is not None and path.startswith(self._begin):
            race, self.race = self.race, None
            race()


def loaded(directory: Path) -> State:
    found: State = {}
    for shard in directory.glob("*.safetensors"):
        found |= load_file(shard)
    return found


def _as_pipe(path: Path) -> None:
    """A reader that opens it waits for a writer, for ever."""
    path.unlink()
    os.mkfifo(path)


def following(store: Path, directory: Path) -> Follower:
    return Follower(Receiver(store), directory)


def test_the_directory_follows_every_version(
    published: Store, states: tuple[State, ...], same: Same, tmp_path: Path
) -> None:
    store, done = published
    with following(store, tmp_path / "held") as follows:
        for step in done:
            pulled = follows.pull(step.version)
            assert pulled.state_hash == step.state_hash
            assert pulled.from_full == (step.version == 1)
            assert same(loaded(tmp_path / "held"), states[step.version - 1])
            assert follows.held is not None
            assert follows.held.version == step.version


def test_a_restart_goes_on_from_what_is_held(
    published: Store, states: tuple[State, ...], same: Same, tmp_path: Path
) -> None:
    store, _ = published
    with following(store, tmp_path / "held") as follows:
        follows.pull(SEVEN)
    with following(store, tmp_path / "held") as follows:
        pulled = follows.pull()
    assert (pulled.from_full, pulled.mended) == (False, False)
    assert same(loaded(tmp_path / "held"), states[7])


def test_nothing_is_read_or_written_where_the_version_is_there(
    published: Store, tmp_path: Path
) -> None:
    store, _ = published
    with following(store, tmp_path / "held") as follows:
        follows.pull()
        record = read_record(tmp_path / "held")
        pulled = follows.pull()
    assert (pulled.bytes_read, pulled.tensors_written) == (0, 0)
    assert read_record(tmp_path / "held") == record


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("file", ["model.safetensors.index.json", "model-00001"])
def test_a_version_that_is_pruned_while_it_is_read_gives_way_to_the_newest(
    states: tuple[State, ...], same: Same, tmp_path: Path, file: str, *, held: bool
) -> None:
    settings = VersionSettings(anchor_every=2, keep_versions=1, skip_deltas=False)
    with Publisher(tmp_path / "store", versions=settings) as publisher:
        source = _Raced(tmp_path / "store", f"weight_v000004/{file}")
        with Follower(Receiver(source), tmp_path / "held") as follows:
            for state in states[:3]:
                publisher.publish(state)
            if held:
                follows.pull()
            publisher.publish(states[3])
            source.race = lambda: [publisher.publish(state) for state in states[4:8]]
            assert follows.pull().version == EIGHT
    assert same(loaded(tmp_path / "held"), states[7])


def test_a_version_that_is_asked_for_by_its_number_gives_way_to_no_other(
    states: tuple[State, ...], tmp_path: Path
) -> None:
    settings = VersionSettings(anchor_every=1, keep_versions=1, skip_deltas=False)
    with Publisher(tmp_path / "store", versions=settings) as publisher:
        for state in states[:4]:
            publisher.publish(state)
    with following(tmp_path / "store", tmp_path / "held") as follows:
        with pytest.raises(Stale):
            follows.pull(WeightVersion(2))
        assert follows.held is None


def test_a_link_among_the_files_is_not_written_through(
    published: Store, states: tuple[State, ...], same: Same, tmp_path: Path
) -> None:
    store, _ = published
    with following(store, tmp_path / "held") as follows:
        follows.pull(SEVEN)
    shutil.copytree(tmp_path / "held", tmp_path / "linked")
    for shard in (tmp_path / "held").glob("*.safetensors"):
        (tmp_path / "linked" / shard.name).unlink()
        (tmp_path / "linked" / shard.name).symlink_to(shard)
    (tmp_path / "linked" / ".tmp-of-another").mkdir()
    with following(store, tmp_path / "linked") as follows:
        assert follows.pull().version == EIGHT
    assert same(loaded(tmp_path / "linked"), states[7])
    assert same(loaded(tmp_path / "held"), states[6])


def test_a_version_can_be_gone_back_to_by_its_name_only(
    published: Store, states: tuple[State, ...], same: Same, tmp_path: Path
) -> None:
    store, _ = published
    with following(store, tmp_path / "held") as follows:
        follows.pull()
        (store / "LATEST").write_text("weight_v000003\n")
        with pytest.raises(Stale, match="name the version"):
            follows.pull()
        shutil.rmtree(store / "weight_v000008")
    with following(store, tmp_path / "held") as follows:
        with pytest.raises(Stale, match="name the version"):
            follows.pull()
        follows.pull(THREE)
    assert same(loaded(tmp_path / "held"), states[2])


def test_a_store_that_began_anew_is_taken_from_its_full_version(
    published: Store, states: tuple[State, ...], same: Same, tmp_path: Path
) -> None:
    """Version 2 of another run: the same number, other bits."""
    store, _ = published
    with following(store, tmp_path / "held") as follows:
        follows.pull(WeightVersion(2))
    with Publisher(tmp_path / "other") as publisher:
        for state in states[9:12]:
            publisher.publish(state)
    for version in (2, 3):
        with following(tmp_path / "other", tmp_path / "held") as follows:
            follows.pull(WeightVersion(version))
            assert same(loaded(tmp_path / "held"), states[8 + version])


@pytest.fixture(params=[8, 25], ids=["with_an_anchor", "a_delta"])
def begun_anew(
    request: pytest.FixtureRequest, tmp_path: Path, states: tuple[State, ...]
) -> tuple[Path, Callable[[], None]]:
    """A store at version 8, and a call after which another run has published version 8 there."""
    store = tmp_path / "run"

    def publish(states: Iterable[State]) -> None:
        shutil.rmtree(store, ignore_errors=True)
        with Publisher(store, versions=VersionSettings(anchor_every=request.param)) as publisher:
            assert [publisher.publish(state).version for state in states][-1] == EIGHT

    publish(states[:8])
    return store, lambda: publish(reversed(states[:8]))


def test_another_run_s_version_of_the_same_number_is_not_held(
    begun_anew: tuple[Path, Callable[[], None]],
    states: tuple[State, ...],
    same: Same,
    tmp_path: Path,
) -> None:
    store, begin_anew = begun_anew
    blank = {name: torch.zeros_like(tensor) for name, tensor in states[-1].items()}
    receiver, target = Receiver(store), TensorTarget(blank)
    with following(store, tmp_path / "held") as follows:
        follows.pull(EIGHT)
        receiver.sync(None, EIGHT, target)
        begin_anew()
        assert follows.pull().from_full
        assert receiver.sync(EIGHT, EIGHT, target).from_full
        assert follows.pull().bytes_read == 0
    assert same(loaded(tmp_path / "held"), states[0])
    assert same(blank, states[0])


@pytest.mark.parametrize("restarts", [False, True])
def test_another_run_s_version_of_the_held_number_is_newer(
    begun_anew: tuple[Path, Callable[[], None]],
    states: tuple[State, ...],
    same: Same,
    tmp_path: Path,
    restarts: bool,
) -> None:
    store, begin_anew = begun_anew
    with following(store, tmp_path / "held") as follows:
        follows.pull()
        assert follows.newer(wait_s=0.0) is None
        if not restarts:
            begin_anew()
            assert follows.newer(wait_s=0.0) == EIGHT
    if restarts:
        begin_anew()
    with following(store, tmp_path / "held") as follows:
        assert follows.newer(wait_s=0.0) == EIGHT
        follows.pull()
        assert follows.newer(wait_s=0.0) is None
    assert same(loaded(tmp_path / "held"), states[0])


def test_a_new_layout_makes_new_files(
    tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    grown = states[1] | {"head.weight": torch.ones(3, 3)}
    with (
        Publisher(tmp_path / "store") as publisher,
        following(_made(publisher, states[0], tmp_path), tmp_path / "held") as follows,
    ):
        follows.pull()
        publisher.publish(grown)
        follows.pull()
        assert same(loaded(tmp_path / "held"), grown)


def _made(publisher: Publisher, state: State, tmp_path: Path) -> Path:
    publisher.publish(state)
    return tmp_path / "store"


class _Mortal(Checkpoint):
    """Dies when the second tensor is written."""

    commits = 0

    def bits(self, name: str) -> Bits:
        if self.commits == 2:
            raise Killed
        return super().bits(name)

    def commit(self, name: str, bits: Bits) -> None:
        type(self).commits += 1
        if self.commits == 2:
            raise Killed


class _MortalTorn(_Mortal):
    """Dies within the second tensor: half of it is new."""

    def commit(self, name: str, bits: Bits) -> None:
        if self.commits == 1:
            bits[: bits.size // 2 + 1] ^= 1
        super().commit(name, bits)


def _killed_within(mortal: type[_Mortal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower of `store` that holds version 1 in `held` and dies on its way to version 2."""
    with following(tmp_path / "store", tmp_path / "held") as follows:
        follows.pull(WeightVersion(1))
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_directory, "Checkpoint", mortal)
        mortal.commits = 0
        alone = Receiver(tmp_path / "store", threads=1)
        with Follower(alone, tmp_path / "held") as follows, pytest.raises(Killed):
            follows.pull()


@pytest.mark.parametrize("encoding", [Encoding.ROSEMUX, Encoding.XOR])
@pytest.mark.parametrize("mortal", [_Mortal, _MortalTorn])
def test_a_kill_within_an_apply_is_repaired(
    tmp_path: Path,
    states: tuple[State, ...],
    same: Same,
    monkeypatch: pytest.MonkeyPatch,
    mortal: type[_Mortal],
    encoding: Encoding,
) -> None:
    with Publisher(tmp_path / "store", versions=VersionSettings(encoding=encoding)) as publisher:
        publisher.publish(states[0])
        publisher.publish(states[1])
    _killed_within(mortal, tmp_path, monkeypatch)
    record = read_record(tmp_path / "held")
    assert isinstance(record, Applying)
    with following(tmp_path / "store", tmp_path / "held") as follows:
        assert follows.held is None
        assert follows.interrupted
        pulled = follows.pull()
    assert pulled.mended
    assert pulled.bytes_read > 0
    assert pulled.from_full == (mortal is _MortalTorn)
    assert same(loaded(tmp_path / "held"), states[1])


@pytest.mark.parametrize("changed", [("embed.weight",), ("embed.weight", "steps"), None])
def test_a_kill_within_an_apply_is_repaired_from_a_store_that_was_made_anew(
    tmp_path: Path,
    states: tuple[State, ...],
    same: Same,
    monkeypatch: pytest.MonkeyPatch,
    changed: tuple[str, ...] | None,
) -> None:
    """Its version 2 changes a part of the tensors that were to change, or all in another way."""
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish(states[0])
        publisher.publish(states[1])
    _killed_within(_Mortal, tmp_path, monkeypatch)
    shutil.rmtree(tmp_path / "store")
    names = states[0] if changed is None else changed
    other = states[0] | {name: states[2][name] for name in names}
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish(states[0])
        step = publisher.publish(other)
    with following(tmp_path / "store", tmp_path / "held") as follows:
        pulled = follows.pull()
        assert pulled.mended
        assert pulled.state_hash == step.state_hash
    assert same(loaded(tmp_path / "held"), other)
    with following(tmp_path / "store", tmp_path / "held") as follows:
        assert follows.held is not None
        assert follows.held.state_hash == step.state_hash


def test_a_file_that_changed_by_itself_is_no_version_until_it_is_repaired(
    published: Store, states: tuple[State, ...], same: Same, tmp_path: Path
) -> None:
    store, _ = published
    with following(store, tmp_path / "held") as follows:
        follows.pull()
    shard = tmp_path / "held" / SHARD
    raw = bytearray(shard.read_bytes())
    raw[-3] ^= 1
    shard.write_bytes(raw)
    with following(store, tmp_path / "held") as follows:
        assert follows.held is None
        assert not isinstance(read_record(tmp_path / "held"), Held)
        pulled = follows.pull()
    assert (pulled.mended, pulled.tensors_written) == (True, 1)
    assert same(loaded(tmp_path / "held"), states[7])


@pytest.mark.parametrize(
    "damage",
    [
        lambda held: (held / "rosemux.json").write_bytes(b""),
        lambda held: (held / "rosemux.json").unlink(),
        lambda held: (held / "rosemux.json").write_bytes(b'{"state":"held","version":8}'),
        lambda held: (held / SHARD).unlink(),
        lambda held: (held / SHARD).write_bytes(b"x" * 100),
        lambda held: (held / "model.safetensors.index.json").write_bytes(b"{"),
        lambda held: _as_pipe(held / "rosemux.json"),
        lambda held: _as_pipe(held / "model.safetensors.index.json"),
        lambda held: _as_pipe(held / SHARD),
    ],
)
def test_a_broken_directory_is_made_anew(
    published: Store,
    states: tuple[State, ...],
    same: Same,
    tmp_path: Path,
    damage: Callable[[Path], None],
) -> None:
    store, _ = published
    with following(store, tmp_path / "held") as follows:
        follows.pull()
    damage(tmp_path / "held")
    with following(store, tmp_path / "held") as follows:
        assert follows.held is None
        with suppress(Corrupt):
            assert not isinstance(read_record(tmp_path / "held"), Held)
        follows.pull()
    assert same(loaded(tmp_path / "held"), states[7])


def test_a_damaged_version_leaves_the_directory_as_it_was(
    published: Store, states: tuple[State, ...], same: Same, tmp_path: Path
) -> None:
    store, _ = published
    shutil.copytree(store, tmp_path / "whole")
    with following(store, tmp_path / "held") as follows:
        follows.pull(SEVEN)
        (store / "weight_v000008" / SHARD).write_bytes(b"garbage")
        with pytest.raises(Corrupt):
            follows.pull()
        assert follows.held is not None
        assert follows.held.version == SEVEN
        assert same(loaded(tmp_path / "held"), states[6])
        shutil.rmtree(store)
        shutil.copytree(tmp_path / "whole", store)
        follows.pull()
    assert same(loaded(tmp_path / "held"), states[7])


@pytest.mark.parametrize("refused", [1, 2])
def test_a_full_disk_keeps_the_version_or_says_that_it_is_none(
    published: Store,
    states: tuple[State, ...],
    same: Same,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: int,
) -> None:
    """The first record comes before, the second after the tensors are written."""
    store, _ = published
    records: list[ApplyRecord] = []
    real = checkpoint_directory.write_record

    def write(where: Path, record: ApplyRecord) -> None:
        records.append(record)
        if len(records) == refused:
            raise durable.storage_error(OSError(errno.ENOSPC, "No space left on device"), where)
        real(where, record)

    with following(store, tmp_path / "held") as follows:
        follows.pull(SEVEN)
        monkeypatch.setattr(checkpoint_directory, "write_record", write)
        with pytest.raises(Exhausted):
            follows.pull()
        assert (follows.held is None) == (refused == 2)
        assert isinstance(read_record(tmp_path / "held"), Held) == (refused == 1)
        follows.pull()
    assert same(loaded(tmp_path / "held"), states[7])


def test_a_closed_follower_or_receiver_says_so(published: Store, tmp_path: Path) -> None:
    store, _ = published
    receiver = Receiver(store)
    with Follower(receiver, tmp_path / "held") as follows:
        follows.pull(SEVEN)
    with pytest.raises(ConfigError, match=f"follower of {tmp_path / 'held'} is closed"):
        follows.pull()
    receiver.close()
    with (
        Follower(receiver, tmp_path / "held") as follows,
        pytest.raises(ConfigError, match="receiver is closed"),
    ):
        follows.pull()


def test_a_directory_has_one_owner(published: Store, tmp_path: Path) -> None:
    store, _ = published
    with (
        following(store, tmp_path / "held"),
        pytest.raises(ConfigError, match="another receiver keeps"),
    ):
        following(store, tmp_path / "held")
    following(store, tmp_path / "held").close()


def test_an_empty_store_and_a_stranger_s_directory_say_what_to_do(
    published: Store, tmp_path: Path
) -> None:
    store, _ = published
    (tmp_path / "empty").mkdir()
    with (
        following(tmp_path / "empty", tmp_path / "held") as follows,
        pytest.raises(ConfigError, match="publish one first"),
    ):
        follows.pull()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="name another directory"):
        following(store, tmp_path / "theirs")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot write"):
        following(store, tmp_path / "file")
