"""UUIDs of the GPUs on which an engine's ranks run, as one of its API servers finds them.

Production's front end must not touch a GPU: NVML alone is asked. There is no answer where it could
name another GPU than a rank's: for slices of MIG, for devices that an option chose, for GPUs of
several models that CUDA may number otherwise, and without NVML.
"""

import os
from contextlib import suppress
from typing import Any

from harvester.contracts.page import MOST_GPUS


def engine_gpus(parallel: Any) -> tuple[str, ...]:
    """GPUs of the ranks that this server's configuration puts on this machine; empty on a CPU and
    where they are not known. Never raises: it runs in production."""
    with suppress(Exception):
        platform = nvml_platform()
        # `--device-ids`, where vLLM has it: ranks are then on other devices than their numbers.
        if platform is None or getattr(parallel, "assigned_physical_gpu_ids", None) is not None:
            return ()
        if not _has_cudas_numbers():
            return ()
        ranks = parallel.world_size
        first = ranks * (parallel.data_parallel_rank_local or 0)
        last = first + ranks * parallel.data_parallel_size_local
        uuids = tuple(str(platform.get_device_uuid(device)) for device in range(first, last))
        if len({*uuids}) <= MOST_GPUS and not any(map(_is_sliced, uuids)):
            return uuids
    return ()


def nvml_platform() -> Any:
    """vLLM's CUDA platform, if it asks NVML; its other one asks torch, which would create a context
    on the GPU. None on any other platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        from vllm.platforms.cuda import NvmlCudaPlatform

        if isinstance(current_platform, NvmlCudaPlatform):
            return current_platform
    return None


def _has_cudas_numbers() -> bool:
    """Whether the devices that this process sees have the numbers in NVML that they have in CUDA,
    whose default order is the fastest first."""
    from vllm.third_party import pynvml

    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    seen = [entry for each in listed if (entry := each.strip())]
    if any(entry.startswith("MIG-") for entry in seen):
        return False
    by_uuid = bool(seen) and all(entry.startswith("GPU-") for entry in seen)
    if by_uuid or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return True
    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return len({pynvml.nvmlDeviceGetName(handle) for handle in handles}) == 1
    finally:
        pynvml.nvmlShutdown()


def _is_sliced(uuid: str) -> bool:
    """Whether a GPU is divided by MIG: its own UUID then names none of its slices."""
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    try:
        mode, _ = pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        return False
    finally:
        pynvml.nvmlShutdown()
    return bool(mode)
