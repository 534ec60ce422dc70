"""The order of CUDA's calls, over a torch.cuda that only notes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_slot.device import CpuDevice, CudaDevice, KnownDevice, device_of


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    @contextmanager
    def stream(one: Any) -> Iterator[None]:
        calls.append(f"on {one.name}")
        yield
        calls.append(f"off {one.name}")

    @contextmanager
    def graph(one: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        calls.append(f"capture into {pool} on {stream.name}, {capture_error_mode}")
        yield

    own = SimpleNamespace(name="stream", synchronize=lambda: calls.append("synchronize"))
    fake = {
        "set_device": lambda device: calls.append(f"set {device}"),
        "Stream": lambda device: own,
        "stream": stream,
        "graph": graph,
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: calls.append("replay")),
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return calls


def test_work_is_warmed_up_captured_and_replayed_on_one_stream(noted: list[str]) -> None:
    device = CudaDevice()
    assert device.torch_device == torch.device("cuda", 0)
    replay = device.captured(lambda: noted.append("work"))
    warm = ["on stream", "work", "work", "work", "off stream", "synchronize"]
    captured = ["capture into pool on stream, thread_local", "work", "synchronize"]
    replayed = ["on stream", "replay", "off stream"]
    # The first replay uploads the graph.
    assert noted == ["set cuda:0", *warm, *captured, *replayed, "synchronize"]
    noted.clear()
    replay()
    assert noted == replayed, "the work itself does not run again"


def test_a_given_stream_is_used(noted: list[str]) -> None:
    green = SimpleNamespace(name="green", synchronize=lambda: noted.append("green is done"))
    device = CudaDevice(green)  # type: ignore[arg-type]
    device.synchronize()
    with device.current():
        pass
    assert noted == ["set cuda:0", "green is done", "on green", "off green"]


def test_kinds_of_devices() -> None:
    assert type(device_of("cpu")) is CpuDevice
    turns = device_of("turns:/tmp/turns")
    assert isinstance(turns, KnownDevice)
    assert turns.turns is not None
    assert device_of("apart") == KnownDevice()
