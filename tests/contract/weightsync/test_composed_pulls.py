"""A server composes deltas for a receiver that is behind, from the version that it holds."""

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import fsspec
import msgspec
import numpy as np
import pytest
import torch

from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from tests.contract.weightsync.foreign_stores.trainers import GOLDEN
from tests.contract.weightsync.test_skip_pulls import LAST, SHARES, STATES, part, publish
from tests.virtual_clock import VirtualClock
from tests.weight_servers import HASTY, relayed, served
from weightsync.layout.adapter import Adapter, Base
from weightsync.layout.names import CONFIG_FILE, INDEX_FILE, READY_FILE, VersionRef
from weightsync.publish.composing import composed_files
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Publisher
from weightsync.reading.spool import MemoryStaging, StagedFile
from weightsync.receive.held_parts import Selection
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.serve import composed_versions
from weightsync.serve.composed_versions import Compose, ComposedVersions
from weightsync.serve.server import ServingLimits
from weightsync.transport.directory import DirectorySource
from weightsync.transport.http_source import HttpSource
from weightsync.transport.source import StoreSource
from weightsync.transport.wire import StoreVersions

State = dict[str, torch.Tensor]


def _steps(url: str, held: int) -> list[str]:
    with closing(Receiver(HttpSource(url, HASTY))) as receiver:
        plan = receiver.plan(WeightVersion(held), LAST)
    return [step.ref.directory for step in plan.steps]


def _caught_up(url: str, held: int, share: Selection | None = None) -> int:
    """The bytes that a holder of a version reads to get to the last one, whose bits it then has."""
    state, expected = part(STATES[held - 1], share), part(STATES[-1], share)
    with closing(Receiver(HttpSource(url, HASTY), selection=share)) as receiver:
        receiver.sync(None, WeightVersion(held), TensorTarget(state))
        plan = receiver.plan(WeightVersion(held), LAST)
        receiver.sync(WeightVersion(held), LAST, TensorTarget(state))
        assert receiver.reapplied == 0
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    return plan.size_bytes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with one store of nine versions, of which the first is full."""
    root = tmp_path_factory.mktemp("stores")
    publish(str(root / "job-a"), ranks=1)
    return root


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES.keys())
@pytest.mark.parametrize("kind", ["one rank", "two ranks", "objects"])
def test_a_holder_of_any_version_reads_one_delta_and_ends_at_the_published_bits(
    tmp_path: Path, kind: str, share: Selection | None
) -> None:
    place = "memory://composed" if kind == "objects" else str(tmp_path)
    publish(f"{place}/job-a", ranks=2 if kind == "two ranks" else 1)
    try:
        with served(place) as server:
            url = f"{server}/stores/job-a"
            assert _steps(url, 2) == ["skip_v000002_v000009"]
            assert _caught_up(url, 2, share) < sum(_delta_bytes(url, 3))
    finally:
        if kind == "objects":
            fsspec.filesystem("memory").rm("/composed", recursive=True)


def _delta_bytes(url: str, first: int) -> list[int]:
    with closing(Receiver(HttpSource(url, HASTY))) as receiver:
        receiver.plan(WeightVersion(LAST - 1), LAST)
        steps = (
            receiver.plan(WeightVersion(version - 1), WeightVersion(version)).size_bytes
            for version in range(first, LAST + 1)
        )
        return list(steps)


def test_a_delta_that_the_store_has_is_not_composed(root: Path) -> None:
    def refused(_: StoreSource, ref: VersionRef, __: threading.Event) -> Mapping[str, StagedFile]:
        raise AssertionError(ref)

    with served(root, compose=refused) as server:
        url = f"{server}/stores/job-a"
        assert _steps(url, 1) == ["skip_v000001_v000009"]
        assert _steps(url, 6) == [f"weight_v{version:06d}" for version in (7, 8, 9)], "too near"


def test_without_a_composing_server_a_receiver_takes_what_the_store_has(
    root: Path, tmp_path: Path
) -> None:
    stored = ["weight_v000004", "weight_v000005", "skip_v000005_v000009"]
    with served(root, compose=None) as server:
        assert _steps(f"{server}/stores/job-a", 3) == stored
    with served(root) as server, relayed(server, tmp_path / "cache") as relay:
        assert _steps(f"{relay}/stores/job-a", 3) == stored, "readers of a relay share its files"


def _broken(source: StoreSource, ref: VersionRef, until: threading.Event) -> dict[str, StagedFile]:
    files = dict(composed_files(source, ref, until))
    shard = next(file for name, file in files.items() if name.endswith(".safetensors"))
    shard.write(shard.size_bytes - 1, np.zeros(1, dtype=np.uint8) + 77)
    return files


def _failing(source: StoreSource, ref: VersionRef, until: threading.Event) -> dict[str, StagedFile]:
    raise Corrupt("a delta of the chain")


@pytest.mark.parametrize("compose", [_broken, _failing])
def test_a_delta_that_is_composed_wrongly_or_not_at_all_costs_only_bytes(
    root: Path, compose: Compose
) -> None:
    with served(root, compose=compose) as server:
        assert _caught_up(f"{server}/stores/job-a", 3) > 0


def test_one_that_takes_long_is_not_waited_for_and_is_there_for_the_next_reader(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def slow(
        source: StoreSource, ref: VersionRef, until: threading.Event
    ) -> Mapping[str, StagedFile]:
        assert goes_on.wait(60)
        return composed_files(source, ref, until)

    monkeypatch.setattr(composed_versions, "_WAIT_S", 0.1)
    with served(root, compose=slow) as server:
        url = f"{server}/stores/job-a"
        assert _steps(url, 3) == ["weight_v000004", "weight_v000005", "skip_v000005_v000009"]
        goes_on.set()
        monkeypatch.setattr(composed_versions, "_WAIT_S", 60.0)
        assert _steps(url, 3) == ["skip_v000003_v000009"]


def test_a_receiver_waits_for_one_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, asked = threading.Event(), []

    def slow(_: StoreSource, ref: VersionRef, __: threading.Event) -> Mapping[str, StagedFile]:
        goes_on.wait(60)
        raise Corrupt(str(ref))

    class Counted(HttpSource):
        def read_small(self, path: str, limit_bytes: int) -> bytes:
            asked.append(path)
            return super().read_small(path, limit_bytes)

    monkeypatch.setattr(composed_versions, "_WAIT_S", 0.1)
    with served(root, compose=slow) as server:
        state = {name: tensor.clone() for name, tensor in STATES[2].items()}
        with closing(Receiver(Counted(f"{server}/stores/job-a", HASTY))) as receiver:
            receiver.sync(WeightVersion(3), LAST, TensorTarget(state))
        goes_on.set()
    assert asked.count(f"skip_v000003_v000009/{INDEX_FILE}") == 1
    assert all(torch.equal(state[name], STATES[-1][name]) for name in state)


def test_a_reader_that_waits_for_one_takes_no_place_of_a_transfer(root: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(
        source: StoreSource, ref: VersionRef, until: threading.Event
    ) -> Mapping[str, StagedFile]:
        begun.set()
        goes_on.wait(60)
        return composed_files(source, ref, until)

    limits = ServingLimits(transfers_max=1)
    with served(root, compose=slow, limits=limits) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_got, f"{server}/stores/job-a/skip_v000003_v000009/{INDEX_FILE}")
        try:
            assert begun.wait(30)
            assert _got(f"{server}/stores/job-a/weight_v000009/{READY_FILE}") == b""
        finally:
            goes_on.set()
        assert waiting.result()


def _got(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as reply:
        found: bytes = reply.read()
    return found


def test_a_store_of_another_trainer_has_none(root: Path) -> None:
    for place, store, composes in ((root, "job-a", True), (GOLDEN, "slime-xor", False)):
        with served(place) as server:
            listing = msgspec.json.decode(_got(f"{server}/stores/{store}"), type=StoreVersions)
            assert listing.composes is composes


def test_a_store_whose_deltas_do_not_add_up_is_found_to_have_none(tmp_path: Path) -> None:
    settings = VersionSettings(encoding="context")  # type: ignore[arg-type]
    with Publisher(tmp_path / "job-a", versions=settings) as publisher:
        for state in STATES[:6]:
            publisher.publish(state)
    found = []
    with served(tmp_path) as server:
        for _ in range(2):
            listing = msgspec.json.decode(_got(f"{server}/stores/job-a"), type=StoreVersions)
            found.append(listing.composes)
            with suppress(urllib.error.HTTPError):
                _got(f"{server}/stores/job-a/skip_v000002_v000006/{INDEX_FILE}")
    assert found == [True, False]


def test_one_that_failed_is_not_composed_again_for_a_while(root: Path) -> None:
    asked: list[VersionRef] = []

    def failing(_: StoreSource, ref: VersionRef, __: threading.Event) -> Mapping[str, StagedFile]:
        asked.append(ref)
        raise Corrupt("a delta of the chain")

    async def ask_at(*times_s: float) -> None:
        clock = VirtualClock()
        composed = ComposedVersions(failing, kept_bytes=1, clock=clock)
        ref = VersionRef(composed_versions.Kind.SKIP, LAST, WeightVersion(3))
        for now_s in times_s:
            clock.advance_to(now_s)
            with pytest.raises(FileNotFoundError, match="composed"):
                await composed.file(
                    "job-a", DirectorySource(root / "job-a"), ref, INDEX_FILE, doubted=False
                )
        composed.close()

    asyncio.run(ask_at(0.0, 1.0, 50.0, 70.0))
    assert len(asked) == 2


def test_another_run_under_the_same_numbers_is_composed_anew(tmp_path: Path) -> None:
    first, second = STATES, [{n: -t for n, t in state.items()} for state in STATES]
    with served(tmp_path) as server:
        url = f"{server}/stores/job-a"
        for run in (first, second):
            with Publisher(
                tmp_path / "job-a", versions=VersionSettings(skip_deltas=False)
            ) as publisher:
                for state in run:
                    publisher.publish(state)
            held = {name: tensor.clone() for name, tensor in run[2].items()}
            with closing(Receiver(HttpSource(url, HASTY))) as receiver:
                receiver.sync(WeightVersion(3), LAST, TensorTarget(held))
                assert receiver.reapplied == 0
            assert all(torch.equal(held[name], run[-1][name]) for name in held)
            for path in (tmp_path / "job-a").glob("*_v*"):
                path.rename(tmp_path / f"{path.name}-{run is first}")
            (tmp_path / "job-a" / "LATEST").unlink()


def test_an_adapter_is_composed_with_its_configuration(tmp_path: Path) -> None:
    adapter = Adapter(
        Base(store="base", version=WeightVersion(1), state_hash="0" * 32),
        {"peft_type": "LORA", "r": 4},
    )
    with Publisher(
        tmp_path / "job-a", adapter=adapter, versions=VersionSettings(skip_deltas=False)
    ) as publisher:
        for state in STATES:
            publisher.publish({f"base_model.model.{n}.lora_A": t for n, t in state.items()})
    with served(tmp_path) as server:
        source = HttpSource(f"{server}/stores/job-a", HASTY)
        here = source.read_small(f"skip_v000002_v000009/{CONFIG_FILE}", 1 << 16)
        assert here == (tmp_path / "job-a" / "weight_v000009" / CONFIG_FILE).read_bytes()
        index = msgspec.json.decode(
            source.read_small(f"skip_v000002_v000009/{INDEX_FILE}", 1 << 20)
        )
        assert index["rosemux"]["adapter"]["base_store"] == "base"
        source.close()


async def _asked(kept_bytes: int, bases: tuple[int, ...], root: Path) -> list[int]:
    """The bases that are composed when one reader after the other asks for an index and a file."""
    made: list[int] = []

    def counted(
        source: StoreSource, ref: VersionRef, until: threading.Event
    ) -> Mapping[str, StagedFile]:
        made.append(ref.base or 0)
        return composed_files(source, ref, until)

    source = DirectorySource(root / "job-a")
    composed = ComposedVersions(counted, kept_bytes=kept_bytes)
    for base in bases:
        ref = VersionRef(composed_versions.Kind.SKIP, LAST, WeightVersion(base))
        for name in (INDEX_FILE, "rank-00000-00001.safetensors"):
            assert (await composed.file("job-a", source, ref, name, doubted=False)).size_bytes
    composed.close()
    return made


def test_those_used_last_are_kept_up_to_a_bound(root: Path) -> None:
    assert asyncio.run(_asked(1 << 20, (2, 3, 2, 3), root)) == [2, 3]
    assert asyncio.run(_asked(1, (2, 3, 3, 2), root)) == [2, 3, 2]


def test_many_that_are_asked_for_at_once_are_refused(root: Path) -> None:
    goes_on = threading.Event()

    def slow(
        source: StoreSource, ref: VersionRef, until: threading.Event
    ) -> Mapping[str, StagedFile]:
        goes_on.wait(60)
        return composed_files(source, ref, until)

    async def asked() -> list[object]:
        composed = ComposedVersions(slow, kept_bytes=1 << 20)
        source = DirectorySource(root / "job-a")
        refs = [
            VersionRef(composed_versions.Kind.SKIP, LAST, WeightVersion(b)) for b in range(1, 7)
        ]
        asked = [*(("job-a", ref) for ref in refs), ("job-b", refs[0])]
        tasks = [
            asyncio.create_task(composed.file(store, source, ref, INDEX_FILE, doubted=False))
            for store, ref in asked
        ]
        await asyncio.sleep(0.2)
        goes_on.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        composed.close()
        return found

    found = asyncio.run(asked())
    assert isinstance(found.pop(), MemoryStaging), "another store has a share of its own"
    assert sum(isinstance(each, MemoryStaging) for each in found) == 4
    assert sum(isinstance(each, FileNotFoundError) for each in found) == 2
