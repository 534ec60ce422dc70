"""What the driver's program says of the GPUs is what NVML and torch say."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from coserve.gpus import ComputeMode, Gpu, gpus
from coserve.isolation import TIME_SLICING, choose
from tests.gpu.conftest import ON_A_GPU, need_cuda
from tests.gpu.nvidia_smi import UUIDS, played


@dataclass(frozen=True)
class Driver:
    command: str
    gpus: tuple[Gpu, ...]
    """As another way to ask tells them."""


@pytest.fixture(params=["played", pytest.param("real", marks=ON_A_GPU)])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Driver:
    if request.param == "played":
        there = tuple(Gpu(uuid, ComputeMode.DEFAULT) for uuid in UUIDS)
        return Driver(played(tmp_path, "Default", "Default"), there)
    need_cuda()
    return Driver("nvidia-smi", _known_to_nvml())


def _known_to_nvml() -> tuple[Gpu, ...]:
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
        return tuple(
            Gpu(nvml.nvmlDeviceGetUUID(one), modes[nvml.nvmlDeviceGetComputeMode(one)])
            for one in handles
        )
    finally:
        nvml.nvmlShutdown()


def test_gpus_are_those_that_the_driver_has(driver: Driver) -> None:
    assert gpus(driver.command) == driver.gpus


def test_a_guest_of_these_gpus_is_time_sliced(driver: Driver) -> None:
    assert choose(gpus=gpus(driver.command)) is TIME_SLICING


@pytest.mark.gpu
def test_torch_knows_a_gpu_by_the_same_uuid() -> None:
    need_cuda()
    import torch

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert f"GPU-{uuid}" in [gpu.uuid for gpu in gpus()]
