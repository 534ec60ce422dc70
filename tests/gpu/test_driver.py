"""nvidia-smi reports the same GPUs and memory as NVML and torch."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.testbed.gpu_hardware import gpu_memory
from coserve.guest.gpus import ComputeMode, Gpu, gpus
from coserve.guest.isolation import TIME_SLICING, choose
from tests.gpu.conftest import ON_A_GPU, need_cuda
from tests.gpu.nvidia_smi import TOTAL_MIB, UUIDS, fake

MIB = 1 << 20


@dataclass(frozen=True)
class Driver:
    command: str
    gpus: tuple[Gpu, ...]
    """GPUs as reported by a second source."""
    total_bytes: int
    """Memory of each GPU."""


@pytest.fixture(params=["fake", pytest.param("real", marks=ON_A_GPU)])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Driver:
    if request.param == "fake":
        there = tuple(Gpu(uuid, ComputeMode.DEFAULT) for uuid in UUIDS)
        return Driver(fake(tmp_path, "Default", "Default"), there, TOTAL_MIB * MIB)
    need_cuda()
    return _known_to_nvml()


def _known_to_nvml() -> Driver:
    nvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed here")
    modes = {
        nvml.NVML_COMPUTEMODE_DEFAULT: ComputeMode.DEFAULT,
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: ComputeMode.EXCLUSIVE_PROCESS,
        nvml.NVML_COMPUTEMODE_PROHIBITED: ComputeMode.PROHIBITED,
    }
    nvml.nvmlInit()
    try:
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        there = tuple(
            Gpu(nvml.nvmlDeviceGetUUID(one), modes[nvml.nvmlDeviceGetComputeMode(one)])
            for one in handles
        )
        total_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handles[0]).total)
        return Driver("nvidia-smi", there, total_bytes)
    finally:
        nvml.nvmlShutdown()


def test_gpus_are_those_that_the_driver_has(driver: Driver) -> None:
    assert gpus(driver.command) == driver.gpus


def test_a_gpu_s_memory_is_what_the_driver_has_of_it(driver: Driver) -> None:
    memory = gpu_memory(driver.gpus[0].uuid, driver.command)
    assert abs(memory.total_bytes - driver.total_bytes) <= MIB, "told in whole MiB"
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_a_guest_of_these_gpus_is_time_sliced(driver: Driver) -> None:
    assert choose(gpus=gpus(driver.command)) is TIME_SLICING


@pytest.mark.gpu
def test_torch_knows_a_gpu_by_the_same_uuid() -> None:
    need_cuda()
    import torch

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert f"GPU-{uuid}" in [gpu.uuid for gpu in gpus()]
