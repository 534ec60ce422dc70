"""Memory of a worker, from its tensors and from a fake driver; needs no GPU."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pynvml = pytest.importorskip("vllm.third_party.pynvml")

from coserve.vllm import memory_report  # noqa: E402
from coserve.vllm.memory_report import largest, process_bytes, report  # noqa: E402
from harvester.contracts.page import GuestMemory  # noqa: E402

MIB = 1 << 20


class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Two tied weights, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.zeros(256, 1024))
        self.head = self.embedding
        self.register_buffer("scale", torch.zeros(1024))


@pytest.fixture
def worker() -> Any:
    model = Model()
    kv = torch.zeros(4, 2, 16, 1024)
    runner = SimpleNamespace(get_model=lambda: model, kv_caches=[kv[:2], [kv[2:], kv[3]]])
    return SimpleNamespace(model_runner=runner, device="cpu", vllm_config=_config(sleeps=False))


def _config(*, sleeps: bool) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))


def test_shared_storages_count_once_and_a_cpu_says_no_more(worker: Any) -> None:
    assert report(worker) == GuestMemory(weights_bytes=MIB + 4096, kv_bytes=4 * 2 * 16 * 4096)
    assert not report(worker).whole, "what the process holds besides is not known"


def test_graphs_are_private_pools_that_hold_neither_weights_nor_kv() -> None:
    def segment(address: int, pool: tuple[int, int], device: int = 0) -> dict[str, Any]:
        return {
            "address": address,
            "total_size": 100,
            "segment_pool_id": pool,
            "device": device,
        }

    segments = [
        segment(1000, (0, 0)),
        segment(2000, (0, 1)),
        segment(3000, (1, 0)),
        segment(4000, (0, 2)),
        segment(5000, (0, 1), device=1),
    ]
    device = torch.device("cuda:0")
    # Sleep mode has weights and KV in separate pools: 4050 lies within one.
    assert memory_report._graphs_bytes(segments, device, {4050}) == 200


@pytest.fixture
def driver(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU on which this process holds 29 MiB, 20 of them by torch's allocator."""
    worker.device = "cuda:0"
    said = SimpleNamespace(process_bytes=29 * MIB)
    sizes = iter([{1: 5 * MIB}, {2: 7 * MIB}])
    monkeypatch.setattr(memory_report, "_storages", lambda *_: next(sizes))
    monkeypatch.setattr(memory_report, "_graphs_bytes", lambda *_: 2 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 20 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    properties = SimpleNamespace(uuid="1-2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(memory_report, "process_bytes", lambda _uuid, _pid: said.process_bytes)
    return said


def test_on_a_gpu_the_parts_add_up_to_what_the_driver_says(worker: Any, driver: Any) -> None:
    memory = report(worker)
    assert memory == GuestMemory(
        weights_bytes=5 * MIB,
        graphs_bytes=2 * MIB,
        activations_bytes=6 * MIB,
        other_bytes=9 * MIB,
        kv_bytes=7 * MIB,
        whole=True,
    )
    assert memory.floor_bytes + memory.kv_bytes == driver.process_bytes


def test_the_bound_of_a_sleeping_guest_is_reported_and_checked(
    worker: Any, driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    worker.vllm_config = _config(sleeps=True)
    assert report(worker).asleep_bytes_max == 17 * MIB, "all but weights and KV"
    worker._rosemux_weights_away = True
    driver.process_bytes = 17 * MIB
    asleep = GuestMemory(other_bytes=17 * MIB, whole=True, asleep_bytes_max=17 * MIB)
    assert report(worker) == asleep
    assert not caplog.records
    driver.process_bytes = 18 * MIB
    assert report(worker).other_bytes == 18 * MIB
    assert f"above its bound of {17 * MIB}" in caplog.text


@pytest.mark.parametrize("known", [True, False])
def test_an_engine_that_never_sleeps_or_is_unknown_has_no_bound(
    known: bool, worker: Any, driver: Any
) -> None:
    worker.vllm_config = _config(sleeps=not known)
    driver.process_bytes = 29 * MIB if known else None
    assert report(worker).asleep_bytes_max == 0


class Nvml:
    """The driver's lists of processes on one GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.alone: list[Any] = []
        self.under_mps: list[Any] | None = []

    def nvmlInit(self) -> None: ...  # noqa: N802 - NVIDIA's names

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> None:  # noqa: N802
        self.asked.append(uuid)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: None) -> list[Any]:  # noqa: N802
        return self.alone

    def nvmlDeviceGetMPSComputeRunningProcesses(self, _handle: None) -> list[Any]:  # noqa: N802
        if self.under_mps is None:
            raise self.NVMLError
        return self.under_mps


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setattr(memory_report, "nvml", lambda: fake)
    return fake


def held(size: int | None, *, pid: int = 0) -> Any:
    return SimpleNamespace(pid=pid or os.getpid(), usedGpuMemory=size)


def test_nvidia_s_bindings_have_the_names_that_the_fake_has() -> None:
    for name in vars(Nvml):
        if name.startswith("nvml"):
            assert callable(getattr(pynvml, name))


def test_the_driver_is_queried_for_this_process_on_this_gpu(nvml: Nvml) -> None:
    nvml.alone = [held(1, pid=os.getpid() + 1)]
    assert process_bytes("1-2", os.getpid()) is None, "it counts processes in another namespace"
    nvml.alone.append(held(3 * MIB))
    assert process_bytes("GPU-1-2", os.getpid()) == 3 * MIB
    assert nvml.asked == ["GPU-1-2", "GPU-1-2"]


def test_a_client_of_mps_is_in_a_list_of_its_own(nvml: Nvml) -> None:
    nvml.alone = [held(30 * MIB, pid=os.getpid() + 1)]
    nvml.under_mps = [held(5 * MIB)]
    assert process_bytes("1-2", os.getpid()) == 5 * MIB
    nvml.alone.append(held(5 * MIB))
    assert process_bytes("1-2", os.getpid()) == 5 * MIB, "it is in both, and counted once"
    nvml.under_mps = None
    assert process_bytes("1-2", os.getpid()) == 5 * MIB, "a driver without the second list"


def test_a_size_that_the_driver_does_not_know_is_none(nvml: Nvml) -> None:
    nvml.alone = [held(None)]
    assert process_bytes("1-2", os.getpid()) is None


def test_the_driver_is_queried_through_vllm_s_copy_or_else_nvidia_ml_py(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert memory_report.nvml() is pynvml
    monkeypatch.setitem(sys.modules, "vllm.third_party.pynvml", None)
    installed = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda _handle: [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 * MIB)
        ],
    )
    monkeypatch.setitem(sys.modules, "pynvml", installed)
    assert process_bytes("1-2", os.getpid()) == 5 * MIB
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert process_bytes("1-2", os.getpid()) is None, "it cannot be asked"


def test_without_a_driver_the_whole_is_not_known() -> None:
    assert process_bytes("1-2", os.getpid()) is None


def test_the_fullest_gpu_of_several_workers_counts() -> None:
    reports = [GuestMemory(weights_bytes=3), GuestMemory(weights_bytes=2, other_bytes=2)]
    assert largest(msgspec.to_builtins(one) for one in reports) == reports[1]
