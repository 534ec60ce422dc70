"""A guest on a GPU starts under the launch lock, and frees it when it has started or failed."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coserve.guest.launch_lock import LaunchLock
from coserve.vllm import guest_start
from coserve.vllm.environment import Role, SlotEnvironment
from harvester.contracts.errors import ConfigError, Exhausted, Unsupported

BRIEF_S = 0.05


class Gpus:
    """The calls on vLLM's platform."""

    def __init__(self, *uuids: str) -> None:
        self._uuids = uuids

    def is_cuda(self) -> bool:
        return bool(self._uuids)

    def get_device_uuid(self, device_id: int) -> str:
        return self._uuids[device_id]


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[SlotEnvironment]:
    (tmp_path / "slot0").mkdir()
    yield SlotEnvironment(Role.GUEST, "guest", tmp_path / "slot0")
    guest_start.end()


def is_free(folder: Path, gpu: str) -> bool:
    lock = LaunchLock(folder, [gpu])
    try:
        lock.acquire(timeout_s=BRIEF_S)
    except Exhausted:
        return False
    lock.release()
    return True


def test_the_gpus_of_the_engine_are_taken_until_it_has_started(
    slot: SlotEnvironment, tmp_path: Path
) -> None:
    guest_start.acquire_launch_lock(slot, Gpus("GPU-a", "GPU-b", "GPU-c"), workers=2)
    assert not is_free(tmp_path, "GPU-a")
    assert not is_free(tmp_path, "GPU-b")
    assert is_free(tmp_path, "GPU-c")
    guest_start.end()
    assert is_free(tmp_path, "GPU-a")


def test_a_guest_that_is_not_the_agent_waits_where_guests_may_write(
    slot: SlotEnvironment, tmp_path: Path
) -> None:
    (tmp_path / "launch").mkdir()
    guest_start.acquire_launch_lock(slot, Gpus("GPU-a"), workers=1)
    assert not is_free(tmp_path / "launch", "GPU-a")
    assert is_free(tmp_path, "GPU-a")


def test_a_cpu_engine_takes_no_launch_lock(slot: SlotEnvironment, tmp_path: Path) -> None:
    guest_start.acquire_launch_lock(slot, Gpus(), workers=1)
    assert list(tmp_path.glob("*.launch")) == []


def test_an_operator_may_name_the_directory_and_the_patience(
    slot: SlotEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locks").mkdir()
    monkeypatch.setenv(guest_start.LOCKS_VARIABLE, str(tmp_path / "locks"))
    other = LaunchLock(tmp_path / "locks", ["GPU-a"])
    other.acquire(timeout_s=BRIEF_S)
    monkeypatch.setenv(guest_start.TIMEOUT_VARIABLE, "0.05")
    with pytest.raises(Exhausted, match="GPU-a"):
        guest_start.acquire_launch_lock(slot, Gpus("GPU-a"), workers=1)
    other.release()
    guest_start.acquire_launch_lock(slot, Gpus("GPU-a"), workers=1)
    guest_start.end()
    monkeypatch.setenv(guest_start.TIMEOUT_VARIABLE, "soon")
    with pytest.raises(ConfigError, match="seconds above 0"):
        guest_start.acquire_launch_lock(slot, Gpus("GPU-a"), workers=1)


def shape(backend: str = "uni") -> SimpleNamespace:
    parallel = SimpleNamespace(
        world_size=1,
        nnodes=1,
        distributed_executor_backend=backend,
        data_parallel_size=1,
        data_parallel_index=0,
    )
    return SimpleNamespace(parallel_config=parallel)


def test_a_guest_on_ray_is_refused_before_a_worker_starts(slot: SlotEnvironment) -> None:
    pytest.importorskip("vllm.platforms")
    started: list[Any] = []
    locked_start = guest_start.under_launch_lock(lambda *given: started.append(given), slot)
    with pytest.raises(Unsupported, match="may not be a guest: the executor backend ray"):
        locked_start("executor", shape("ray"))
    assert started == []


def test_the_workers_start_under_the_lock_and_a_failed_start_releases_it(
    slot: SlotEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platforms = pytest.importorskip("vllm.platforms")
    monkeypatch.setattr(platforms, "current_platform", Gpus("GPU-a"), raising=False)
    config = shape()
    taken: list[bool] = []

    def start(executor: Any, vllm_config: Any) -> None:
        assert vllm_config is config
        taken.append(not is_free(tmp_path, "GPU-a"))
        if executor == "fails":
            raise MemoryError

    locked_start = guest_start.under_launch_lock(start, slot)
    locked_start("starts", config)
    assert not is_free(tmp_path, "GPU-a"), "graphs and KV are still to come"
    guest_start.end()
    with pytest.raises(MemoryError):
        locked_start("fails", config)
    assert is_free(tmp_path, "GPU-a")
    assert taken == [True, True]
