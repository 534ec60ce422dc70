"""Trainers of other systems that begin anew, and stores that change hands, as readers see them."""

import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Event

import fsspec
import pytest
import torch

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Corrupt
from harvester.contracts.ids import WeightVersion
from tests.contract.weightsync.foreign_stores.trainers import BASE, GOLDEN, states
from tests.integration.slime_writer import DeltaTrainer, raw
from tests.weight_servers import relayed, served
from weightsync import Follower, Publisher, Receiver, TensorTarget
from weightsync.layout.apply_journal import read_record
from weightsync.reading.store import Store
from weightsync.receive.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"
ONE, TWO, THREE = (WeightVersion(version) for version in (1, 2, 3))
State = dict[str, torch.Tensor]


def held(version: int) -> State:
    return {name: tensor.clone() for name, tensor in states()[version].items()}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all((raw(left[n]) == raw(right[n])).all() for n in left)


def first_run(store: Path) -> None:
    trainer = DeltaTrainer(store, BASE, encoding="xor", checksum="xxh3-128")
    for new in (held(1), held(2)):
        trainer.update(new)


def second_run(store: Path) -> State:
    """Its indexes are those of the first run byte for byte; one tensor moves in its first version
    alone. Returns its third version's state."""
    trainer = DeltaTrainer(store, BASE, encoding="xor", checksum="xxh3-128")
    other = held(1)
    other["layer.scale"] *= 3.0
    last = {name: tensor.clone() for name, tensor in other.items()}
    last["norm"][0] = 5.0
    for new in (other, other, last):
        trainer.update(new)
    return last


@pytest.fixture(params=["server", "relay", "relay before a relay"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A server of `tmp_path`, or what stands before it."""
    with served(tmp_path, base_checkpoint=BASE) as upstream:
        if request.param == "server":
            yield upstream
            return
        with relayed(upstream, tmp_path / "cache") as near:
            if request.param == "relay":
                yield near
                return
            with relayed(near, tmp_path / "far-cache") as far:
                yield far


def test_a_run_that_begins_anew_is_noticed_through_servers_and_relays(
    url: str, tmp_path: Path
) -> None:
    store = tmp_path / "job"
    first_run(store)
    with closing(Receiver(f"{url}/stores/job", spool_dir=tmp_path)) as receiver:
        current = held(0)
        assert receiver.sync(None, TWO, TensorTarget(current)).from_full
        assert same(current, held(2))
        last = second_run(store)
        assert receiver.sync(TWO, THREE, TensorTarget(current)).from_full
        assert same(current, last)


def test_a_relay_gives_no_shard_of_an_old_run_to_a_new_reader(url: str, tmp_path: Path) -> None:
    store = tmp_path / "job"
    first_run(store)
    for version, make in ((TWO, lambda _: held(2)), (THREE, second_run)):
        expected = make(store)
        with closing(Receiver(f"{url}/stores/job", spool_dir=tmp_path)) as receiver:
            current = held(0)
            receiver.sync(None, version, TensorTarget(current))
            assert same(current, expected)


def damage_copies(cache: Path, *, but: Collection[Path] = ()) -> None:
    """Give each of a relay's copies a wrong byte, once it is whole."""
    clock = MonotonicClock()
    until_s = clock.now() + 10.0
    while list(cache.glob("job/*.part")) and clock.now() < until_s:
        Event().wait(0.01)
    copies = [path for path in cache.glob("job/*-foreign") if path not in but]
    assert copies
    for copy in copies:
        data = bytearray(copy.read_bytes())
        data[-3] ^= 1
        copy.write_bytes(data)


def test_a_relay_s_damaged_copies_are_pulled_again_after_a_reader_found_them_wrong(
    tmp_path: Path,
) -> None:
    first_run(tmp_path / "job")
    with (
        served(tmp_path, base_checkpoint=BASE) as upstream,
        relayed(upstream, tmp_path / "cache") as near,
        closing(Receiver(f"{near}/stores/job", spool_dir=tmp_path)) as first,
        closing(Receiver(f"{near}/stores/job", spool_dir=tmp_path)) as second,
    ):
        first.prepare(None, ONE)
        damage_copies(tmp_path / "cache")
        current = held(0)
        with pytest.raises(Corrupt):
            second.sync(None, ONE, TensorTarget(current))
        second.sync(None, ONE, TensorTarget(current))
        assert same(current, held(1))


def test_a_holder_and_a_follower_get_past_a_relay_s_damaged_delta_at_once(tmp_path: Path) -> None:
    last = second_run(tmp_path / "job")
    cache = tmp_path / "cache"
    with (
        served(tmp_path, base_checkpoint=BASE) as upstream,
        relayed(upstream, cache) as near,
        closing(Receiver(f"{near}/stores/job", spool_dir=tmp_path)) as first,
        closing(Receiver(f"{near}/stores/job", spool_dir=tmp_path)) as second,
        closing(Receiver(f"{near}/stores/job", spool_dir=tmp_path)) as third,
        Follower(third, tmp_path / "policy") as follower,
    ):
        current = held(0)
        second.sync(None, TWO, TensorTarget(current))
        follower.pull(TWO)
        before = set(cache.glob("job/*"))
        first.prepare(None, THREE)
        damage_copies(cache, but=before)
        second.sync(TWO, THREE, TensorTarget(current))
        assert same(current, last)
        damage_copies(cache, but=before)
        follower.pull(THREE)
        assert keeps(tmp_path / "policy", last)


def test_a_holder_follows_by_deltas_through_a_server(tmp_path: Path) -> None:
    first_run(tmp_path / "job")
    with (
        served(tmp_path, base_checkpoint=BASE) as url,
        closing(Receiver(f"{url}/stores/job", spool_dir=tmp_path)) as receiver,
    ):
        current = held(0)
        assert receiver.sync(None, ONE, TensorTarget(current)).from_full
        assert not receiver.sync(ONE, TWO, TensorTarget(current)).from_full
        assert same(current, held(2))


def test_the_run_in_stitch_s_pointer_tells_runs_apart_where_files_have_no_dates(
    tmp_path: Path,
) -> None:
    """fsspec's memory tells neither an entity tag nor a date."""
    objects = fsspec.filesystem("memory")

    def put(run: str, version: int) -> None:
        objects.put(str(tmp_path / "updates"), "/runs/job/updates", recursive=True)
        objects.pipe_file("/runs/job/latest", f"{run}/weight_v{version:06d}".encode())

    first_run(tmp_path / "updates")
    put("one", 2)
    with closing(Receiver("memory://runs/job", base_checkpoint=BASE)) as receiver:
        current = held(0)
        receiver.sync(None, ONE, TensorTarget(current))
        assert not receiver.sync(ONE, TWO, TensorTarget(current)).from_full
        last = second_run(tmp_path / "updates")
        objects.rm("/runs/job/updates", recursive=True)
        put("two", 3)
        assert receiver.sync(TWO, THREE, TensorTarget(current)).from_full
        assert same(current, last)
    objects.rm("/runs", recursive=True)


def test_a_store_that_another_system_begins_to_write_into_is_refused_by_every_reader(
    tmp_path: Path,
) -> None:
    store = Path(shutil.copytree(GOLDEN / "slime-xor", tmp_path / "store"))
    with closing(Receiver(store, base_checkpoint=BASE)) as receiver:
        assert receiver.latest() == THREE
        shutil.copytree(GOLDEN / "skyrl" / "delta-00000001", store / "delta-00000001")
        for reader in (receiver, Receiver(store, base_checkpoint=BASE)):
            with pytest.raises(ConfigError, match="versions of SkyRL and slime or miles"):
                reader.latest()


def test_a_reader_follows_a_directory_that_another_system_took_over(tmp_path: Path) -> None:
    """slime's trainer clears the directory of a publisher of ours, and the other way round."""
    store = tmp_path / "store"
    with Publisher(store) as publisher:
        publisher.publish(held(1))
        publisher.publish(held(2))
    with closing(Receiver(store, base_checkpoint=BASE)) as receiver:
        current = {name: torch.zeros_like(tensor) for name, tensor in held(0).items()}
        receiver.sync(None, TWO, TensorTarget(current))
        last = second_run(store)
        assert receiver.latest() == THREE
        assert receiver.sync(TWO, THREE, TensorTarget(current)).from_full
        assert same(current, last)
        shutil.rmtree(store)
        with Publisher(store) as publisher:
            for version in (1, 2, 1, 3):
                publisher.publish(held(version))
        assert receiver.latest() == 4
        receiver.sync(THREE, WeightVersion(4), TensorTarget(current))
        assert same(current, held(3))


def second_states(store: Path) -> list[State]:
    """Another run's three versions, of which each differs from the first run's."""
    trainer = DeltaTrainer(store, BASE, encoding="xor", checksum="xxh3-128")
    found = []
    for factor in (3.0, 5.0, 7.0):
        state = held(1)
        state["layer.scale"] *= factor
        trainer.update(state)
        found.append(state)
    return found


def keeps(directory: Path, state: State) -> bool:
    kept = Checkpoint(directory)
    return all((kept.bits(name).view("u1") == raw(tensor)).all() for name, tensor in state.items())


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("newest", [ONE, TWO, THREE])
def test_a_follower_of_a_trainer_that_begins_anew_takes_its_versions_at_any_number(
    tmp_path: Path, newest: WeightVersion, restarts: bool
) -> None:
    store, policy = tmp_path / "job", tmp_path / "policy"
    first_run(store)
    with ExitStack() as stack:

        def following() -> Follower:
            receiver = stack.enter_context(closing(Receiver(store, base_checkpoint=BASE)))
            return stack.enter_context(Follower(receiver, policy))

        follower = following()
        assert follower.pull().version == TWO
        assert follower.newer(wait_s=0.0) is None
        if restarts:
            follower.close()
            follower = following()
        states_of_other = second_states(store)
        for version in range(3, newest, -1):
            shutil.rmtree(store / f"weight_v{version:06d}")
        assert follower.newer(wait_s=0.0) == newest
        pulled = follower.pull()
        assert (pulled.version, pulled.from_full) == (newest, True)
        assert keeps(policy, states_of_other[newest - 1])
        assert follower.newer(wait_s=0.0) is None
    record = read_record(policy)
    assert record is not None
    assert record.version == newest


def test_a_follower_that_restarts_on_a_store_of_ours_finds_its_version_again(
    tmp_path: Path,
) -> None:
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish(held(1))
    for _ in range(2):
        with (
            closing(Receiver(tmp_path / "store")) as receiver,
            Follower(receiver, tmp_path / "policy") as follower,
        ):
            if follower.held is None:
                follower.pull()
            assert follower.newer(wait_s=0.0) is None


@contextmanager
def holding_the_second_run(store: Path) -> Iterator[tuple[Receiver, State]]:
    """A receiver of another trainer's store, and its tensors at version 3."""
    last = second_run(store)
    with closing(Receiver(store, base_checkpoint=BASE)) as receiver:
        current = held(0)
        receiver.sync(None, THREE, TensorTarget(current))
        assert same(current, last)
        yield receiver, current


def test_a_receiver_follows_our_publisher_into_a_cleared_directory_from_its_first_version(
    tmp_path: Path,
) -> None:
    with holding_the_second_run(tmp_path / "store") as (receiver, current):
        with pytest.raises(ConfigError, match="not published yet"):
            # A fault makes the receiver forget what it has read.
            receiver.sync(THREE, WeightVersion(4), TensorTarget(current))
        shutil.rmtree(tmp_path / "store")
        with Publisher(tmp_path / "store") as publisher:
            publisher.publish(held(1))
            assert receiver.sync(THREE, ONE, TensorTarget(current)).from_full
            assert same(current, held(1))
            for version, number in ((TWO, 2), (THREE, 1)):
                publisher.publish(held(number))
                before = WeightVersion(version - 1)
                assert not receiver.sync(before, version, TensorTarget(current)).from_full
                assert receiver.newer(version, wait_s=0.0) is None


def test_our_version_of_the_held_number_is_taken_in_place_of_another_trainer_s(
    tmp_path: Path,
) -> None:
    with holding_the_second_run(tmp_path / "store") as (receiver, current):
        assert receiver.newer(THREE, wait_s=0.0) is None
        shutil.rmtree(tmp_path / "store")
        with Publisher(tmp_path / "store") as publisher:
            for version in (1, 2, 1):
                publisher.publish(held(version))
        assert receiver.newer(THREE, wait_s=0.0) == THREE
        receiver.sync(THREE, THREE, TensorTarget(current))
        assert same(current, held(1))


def test_a_store_of_ours_is_listed_only_when_it_has_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that wait ask for LATEST many times, and object stores charge for a listing."""
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish(held(1))
    store = Store(tmp_path / "store")
    assert store.latest() == ONE
    monkeypatch.setattr(
        "weightsync.transport.directory.DirectorySource.directories",
        lambda _: pytest.fail("listed"),
    )
    assert store.latest() == ONE
