"""What a worker holds, from its tensors and from what a driver says; no GPU is here to ask."""

import os
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
    """Two weights that are one, and a buffer."""

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
    return SimpleNamespace(model_runner=runner, device="cpu")


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
    # Sleep mode has weights and KV in pools of their own: 4050 lies within one.
    assert memory_report._graphs_bytes(segments, device, {4050}) == 200


def test_on_a_gpu_the_parts_add_up_to_what_the_driver_says(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.device = "cuda:0"
    held = {"weights": {1: 5 * MIB}, "kv": {2: 7 * MIB}}
    monkeypatch.setattr(
        memory_report, "_storages", lambda tensors, _device: held.pop(next(iter(held)))
    )
    monkeypatch.setattr(memory_report, "_graphs_bytes", lambda *_: 2 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 20 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    properties = SimpleNamespace(uuid="1-2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(memory_report, "process_bytes", lambda _uuid, _pid: 29 * MIB)
    memory = report(worker)
    assert memory == GuestMemory(
        weights_bytes=5 * MIB,
        graphs_bytes=2 * MIB,
        activations_bytes=6 * MIB,
        other_bytes=9 * MIB,
        kv_bytes=7 * MIB,
        whole=True,
    )
    assert memory.floor_bytes + memory.kv_bytes == 29 * MIB


def test_the_driver_is_asked_for_this_process_on_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    running = [SimpleNamespace(pid=os.getpid() + 1, usedGpuMemory=1)]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", asked.append)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda _handle: running)
    assert process_bytes("1-2", os.getpid()) is None, "it counts processes in another namespace"
    running.append(SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 * MIB))
    assert process_bytes("GPU-1-2", os.getpid()) == 3 * MIB
    assert asked == ["GPU-1-2", "GPU-1-2"]


def test_without_a_driver_the_whole_is_not_known() -> None:
    assert process_bytes("1-2", os.getpid()) is None


def test_of_several_workers_the_fullest_gpu_counts() -> None:
    reports = [GuestMemory(weights_bytes=3), GuestMemory(weights_bytes=2, other_bytes=2)]
    assert largest(msgspec.to_builtins(one) for one in reports) == reports[1]
