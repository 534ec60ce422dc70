"""A relay without its upstream serves the whole versions of its cache, and follows it again
after."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import WeightVersion
from tests.weight_servers import HASTY, relayed, served
from weightsync.publisher import Publisher
from weightsync.reading.store import Store
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.transport.http_source import HttpSource
from weightsync.transport.location import StoreRoot

State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.serve.outage.PATIENCE_S", 0.3)
    monkeypatch.setattr("weightsync.serve.outage._PROBE_EVERY_S", 0.05)


def _state(step: int) -> State:
    torch.manual_seed(0)
    state = {name: torch.randn(300, 200).bfloat16() for name in ("a", "b")}
    for at in range(step):
        state["a"][at::50] *= 2
    return state


@contextmanager
def _receiving(url: str) -> Iterator[Receiver]:
    with closing(Receiver(HttpSource(f"{url}/stores/job-a", HASTY))) as receiver:
        yield receiver


def _taken(url: str, version: int, *, start: int | None = None) -> State:
    held = {name: torch.zeros_like(tensor) for name, tensor in _state(0).items()}
    with _receiving(url) as receiver:
        current = None
        if start is not None:
            current = receiver.sync(None, WeightVersion(start), TensorTarget(held)).version
        receiver.sync(current, WeightVersion(version), TensorTarget(held))
    return held


def _same(held: State, step: int) -> bool:
    return all(torch.equal(held[name], tensor) for name, tensor in _state(step).items())


def test_a_cached_version_is_served_and_the_next_one_follows(tmp_path: Path) -> None:
    root = tmp_path / "stores"
    with Publisher(root / "job-a") as publisher, ExitStack() as stack:
        publisher.publish(_state(0))
        publisher.publish(_state(1))
        up = ExitStack()
        url = up.enter_context(served(root))
        near = stack.enter_context(relayed(url, tmp_path / "cache"))
        assert _same(_taken(near, 2, start=1), 1)
        publisher.publish(_state(2))
        with _receiving(near) as looking:
            assert looking.latest() == 3, "whose files nobody has taken yet"
        up.close()
        with _receiving(near) as receiver:
            assert receiver.latest() == 2
            assert receiver.newer(WeightVersion(2), wait_s=0.2) is None
            assert _same(_taken(near, 2), 1)
            assert _same(_taken(near, 1), 0)
            assert StoreRoot(near, HASTY).names() == ("job-a",)
            heard: list[WeightVersion | None] = []
            waiting = threading.Thread(
                target=lambda: heard.append(receiver.newer(WeightVersion(2), wait_s=20.0))
            )
            waiting.start()
            port = int(url.rpartition(":")[2])
            stack.enter_context(served(root, port=port))
            waiting.join(25)
        assert heard == [3]
        assert _same(_taken(near, 3), 2)


def test_a_version_that_readers_reached_by_a_skip_delta_is_served(tmp_path: Path) -> None:
    """To holders of its base and to joiners; no single delta of it is in the cache."""
    root = tmp_path / "stores"
    with Publisher(root / "job-a") as publisher:
        for step in range(5):
            publisher.publish(_state(step))
    with ExitStack() as stack:
        up = ExitStack()
        url = up.enter_context(served(root))
        near = stack.enter_context(relayed(url, tmp_path / "cache"))
        assert _same(_taken(near, 5, start=1), 4)
        up.close()
        with _receiving(near) as receiver:
            assert receiver.latest() == 5
            plan = receiver.plan(WeightVersion(1), WeightVersion(5))
            assert [step.ref.directory for step in plan.steps] == ["skip_v000001_v000005"]
        assert _same(_taken(near, 5, start=1), 4)
        assert _same(_taken(near, 5), 4)


def test_a_relay_that_starts_without_its_upstream_serves_what_it_kept(tmp_path: Path) -> None:
    root = tmp_path / "stores"
    with Publisher(root / "job-a") as publisher:
        for step in range(3):
            publisher.publish(_state(step))
    with served(root) as url, relayed(url, tmp_path / "cache") as near:
        _taken(near, 3)
        with _receiving(near) as receiver:
            receiver.latest()
    with relayed(url, tmp_path / "cache") as near:
        with closing(Store(HttpSource(f"{near}/stores/job-a", HASTY))) as store:
            assert store.latest() == 3
        assert _same(_taken(near, 3), 2)
    for path in (tmp_path / "cache" / ".remembered" / "job-a").iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    with (
        relayed(url, tmp_path / "cache") as near,
        closing(Store(HttpSource(f"{near}/stores/job-a", HASTY))) as store,
        pytest.raises(Exhausted),
    ):
        store.latest()


def test_a_copy_that_rotted_is_not_served_in_an_outage(tmp_path: Path) -> None:
    root = tmp_path / "stores"
    with Publisher(root / "job-a") as publisher:
        publisher.publish(_state(0))
    with served(root) as url, relayed(url, tmp_path / "cache") as near:
        _taken(near, 1)
    (copy,) = (tmp_path / "cache" / "job-a").iterdir()
    raw = bytearray(copy.read_bytes())
    raw[-9] ^= 1
    copy.write_bytes(raw)
    with relayed(url, tmp_path / "cache") as near, pytest.raises(Exhausted):
        _taken(near, 1)
