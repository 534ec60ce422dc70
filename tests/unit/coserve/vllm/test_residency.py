"""A guest's weights while it sleeps, over vLLM's own executor and a worker that plays the GPU's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.executor.abstract import Executor

from coserve.vllm.capabilities import capabilities
from coserve.vllm.memory_report import report
from coserve.vllm.residency import LEVEL, check, follow_updates, sleeps, wake, weights_away
from harvester.contracts.errors import ConfigError, Unsupported

TAGS = ("weights", "kv_cache")
NEW, OLD = capabilities("0.32.0"), capabilities("0.30.0")


class WeightEngine:
    def __init__(self) -> None:
        self.version = 0


class FakeGate:
    """Notes for what work slack was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @contextmanager
    def piece(self, kind: str) -> Iterator[None]:
        self.asked.append(kind)
        yield


class Worker:
    """Memory by tag, as vLLM keeps it: what sleeps has an address and nothing behind it."""

    def __init__(self) -> None:
        self.mapped = set(TAGS)
        self.weight_transfer_engine = WeightEngine()
        self.device = "cpu"
        self.fails = False
        self.gate = FakeGate()

    def sleep(self, level: int = 1) -> None:
        assert level == 1
        self.mapped.clear()

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.mapped |= set(tags or TAGS)

    def start_weight_update(self) -> None:
        assert "weights" in self.mapped, "the context would be lost"

    def start_draft_weight_update(self) -> None:
        self.start_weight_update()

    def update_weights(self, version: int) -> None:
        assert "weights" in self.mapped
        if self.fails:
            raise RuntimeError("state hash mismatch")
        self.weight_transfer_engine.version = version

    def finish_weight_update(self) -> None:
        assert "weights" in self.mapped

    def rosemux_follow_updates(self) -> None:
        follow_updates(self, self.gate)  # type: ignore[arg-type]


class FakeExecutor(Executor):  # type: ignore[misc]
    """vLLM's bookkeeping of sleeping parts, over one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.sleeping_tags: set[str] = set()

    def _init_executor(self) -> None: ...

    def check_health(self) -> None: ...

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None,
                       **_: Any) -> list[Any]:  # fmt: skip
        return [getattr(self.worker, method)(*args, **(kwargs or {}))]


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor(Worker())


@pytest.fixture
def asleep(executor: FakeExecutor) -> FakeExecutor:
    assert sleeps(config(sleeps=True), executor, NEW, shared_kv=False)
    executor.sleep(LEVEL)
    return executor


def config(*, sleeps: bool) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))


def update(worker: Worker, version: int) -> None:
    worker.start_weight_update()
    worker.update_weights(version)
    worker.finish_weight_update()


def test_without_sleep_mode_weights_stay_where_they_are(executor: FakeExecutor) -> None:
    assert not sleeps(config(sleeps=False), executor, OLD, shared_kv=True)


def test_a_plan_that_cannot_follow_versions_or_share_pages_is_refused(
    executor: FakeExecutor,
) -> None:
    with pytest.raises(Unsupported, match=r"vLLM 0\.30\.0 was not checked .* 0\.31"):
        sleeps(config(sleeps=True), executor, OLD, shared_kv=False)
    with pytest.raises(ConfigError, match="kvcached"):
        sleeps(config(sleeps=True), executor, NEW, shared_kv=True)
    check(capabilities("0.31.0"), shared_kv=False)


def test_asleep_it_holds_nothing_and_awake_everything(
    executor: FakeExecutor, asleep: FakeExecutor
) -> None:
    assert asleep.is_sleeping
    assert executor.worker.mapped == set()
    asleep.sleep(LEVEL)
    wake(asleep)
    assert not asleep.is_sleeping
    assert executor.worker.mapped == set(TAGS)
    wake(asleep)


def test_a_version_comes_through_with_the_weights_alone_awake(
    executor: FakeExecutor, asleep: FakeExecutor
) -> None:
    worker = executor.worker
    worker.start_weight_update()
    assert worker.mapped == {"weights"}, "its KV is production's"
    assert worker.gate.asked == ["wake"], "and slack was asked for"
    worker.update_weights(7)
    worker.finish_weight_update()
    assert worker.mapped == set()
    assert worker.weight_transfer_engine.version == 7
    assert asleep.is_sleeping
    update(worker, 8)
    wake(asleep)
    assert worker.mapped == set(TAGS)
    update(worker, 9)
    assert worker.mapped == set(TAGS), "awake it stays awake"


@pytest.mark.parametrize("before", ["start", "update", "finish"])
def test_a_guest_that_falls_asleep_within_an_update_writes_no_unmapped_memory(
    executor: FakeExecutor, before: str
) -> None:
    """The engine loop obeys a grant with `asleep` between two calls of a trainer."""
    assert sleeps(config(sleeps=True), executor, NEW, shared_kv=False)
    worker = executor.worker
    calls = {
        "start": worker.start_weight_update,
        "update": lambda: worker.update_weights(7),
        "finish": worker.finish_weight_update,
    }
    for name, call in calls.items():
        if name == before:
            executor.sleep(LEVEL)
        call()
    assert worker.weight_transfer_engine.version == 7
    assert worker.mapped == set(), "as the grant said"
    assert executor.is_sleeping
    assert weights_away(worker)
    wake(executor)
    assert worker.mapped == set(TAGS)


def test_a_guest_that_sleeps_and_wakes_again_and_again_within_an_update_takes_it(
    executor: FakeExecutor, asleep: FakeExecutor
) -> None:
    worker = executor.worker
    worker.start_weight_update()
    wake(asleep)
    asleep.sleep(LEVEL)
    worker.update_weights(7)
    assert worker.mapped == {"weights"}
    wake(asleep)
    asleep.sleep(LEVEL)
    worker.finish_weight_update()
    assert worker.mapped == set()
    assert worker.weight_transfer_engine.version == 7


def test_kv_that_was_woken_before_the_weights_is_not_taken_by_an_update(
    executor: FakeExecutor, asleep: FakeExecutor
) -> None:
    """vLLM wakes what a caller names, in any order."""
    worker = executor.worker
    executor.wake_up(["kv_cache"])
    assert weights_away(worker)
    update(worker, 7)
    assert worker.mapped == set(TAGS), "vLLM counts this KV as awake"
    executor.wake_up(["weights"])
    assert not weights_away(worker)
    assert not asleep.is_sleeping
    update(worker, 8)
    assert worker.mapped == set(TAGS)


def test_an_update_of_a_draft_model_finds_the_weights_awake(
    executor: FakeExecutor, asleep: FakeExecutor
) -> None:
    worker = executor.worker
    worker.start_draft_weight_update()
    worker.update_weights(7)
    worker.finish_weight_update()
    assert worker.mapped == set()
    assert asleep.is_sleeping


def test_a_guest_that_is_woken_within_an_update_stays_awake(
    executor: FakeExecutor, asleep: FakeExecutor
) -> None:
    executor.worker.start_weight_update()
    wake(asleep)
    executor.worker.update_weights(7)
    executor.worker.finish_weight_update()
    assert executor.worker.mapped == set(TAGS)


def test_after_a_failed_update_the_weights_wait_awake_for_the_next(
    executor: FakeExecutor, asleep: FakeExecutor
) -> None:
    worker = executor.worker
    worker.fails = True
    worker.start_weight_update()
    with pytest.raises(RuntimeError):
        worker.update_weights(7)
    worker.fails = False
    assert worker.mapped == {"weights"}
    update(worker, 8)
    assert worker.mapped == set()
    assert asleep.is_sleeping


def test_asleep_only_the_context_is_reported(
    executor: FakeExecutor, asleep: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: Callable[[Any], int | None] = lambda _device: 900  # noqa: E731
    monkeypatch.setattr("coserve.vllm.memory_report._held_bytes", held)
    memory = report(executor.worker)
    assert (memory.floor_bytes, memory.other_bytes, memory.whole) == (900, 900, True)
    assert asleep.is_sleeping


def test_an_engine_that_stays_asleep_is_not_stepped(
    executor: FakeExecutor, asleep: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "wake_up", lambda _tags: None)
    with pytest.raises(Unsupported, match="asleep"):
        wake(asleep)
