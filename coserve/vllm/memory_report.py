"""Reports the accelerator memory of a started engine's worker, in parts. It moves and frees
nothing.

Weights and KV are counted as storages. The rest of the allocator's memory is graphs, which have
separate pools, and activations; memory that the driver reports beyond the allocator is context,
code and communicators. A guest holds all of it except KV while its gate is closed.
"""

import importlib
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec
import torch

from coserve.vllm.residency import weights_away
from harvester.contracts.page import GuestMemory

_DEFAULT_POOL = (0, 0)
_NVML = ("vllm.third_party.pynvml", "pynvml")
_ASLEEP_BOUND = "_rosemux_asleep_bytes_max"

_log = logging.getLogger(__name__)


def report(worker: Any) -> GuestMemory:
    """Memory of one worker, after its engine has started, or asleep."""
    device = torch.device(worker.device)
    if weights_away(worker):
        # Storages keep their addresses, but no memory is behind them.
        return _asleep(_held_bytes(device), getattr(worker, _ASLEEP_BOUND, 0))
    runner = worker.model_runner
    model = runner.get_model()
    weights = _storages([*model.parameters(), *model.buffers()], device)
    kv = _storages(_tensors(runner.kv_caches), device)
    memory = GuestMemory(weights_bytes=sum(weights.values()), kv_bytes=sum(kv.values()))
    if device.type != "cuda":
        return memory
    reserved = torch.cuda.memory_reserved(device)
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    graphs = _graphs_bytes(segments, device, {*weights, *kv})
    held = _held_bytes(device)
    known = memory.weights_bytes + memory.kv_bytes + graphs
    memory = msgspec.structs.replace(
        memory,
        graphs_bytes=graphs,
        activations_bytes=max(0, reserved - known),
        other_bytes=0 if held is None else max(0, held - reserved),
        whole=held is not None,
    )
    if memory.whole and worker.vllm_config.model_config.enable_sleep_mode:
        bound = memory.floor_bytes - memory.weights_bytes
        setattr(worker, _ASLEEP_BOUND, bound)
        memory = msgspec.structs.replace(memory, asleep_bytes_max=bound)
    return memory


def largest(reports: Iterable[dict[str, Any]]) -> GuestMemory:
    """The report of the accelerator with the largest floor."""
    return max((GuestMemory(**one) for one in reports), key=lambda one: one.floor_bytes)


def _asleep(held_bytes: int | None, bound_bytes: int) -> GuestMemory:
    if held_bytes is not None and 0 < bound_bytes < held_bytes:
        _log.warning(
            "this worker holds %d bytes of its GPU while it sleeps, above its bound of %d",
            held_bytes,
            bound_bytes,
        )
    return GuestMemory(
        other_bytes=held_bytes or 0,
        whole=held_bytes is not None,
        asleep_bytes_max=bound_bytes,
    )


def _held_bytes(device: torch.device) -> int | None:
    return process_bytes(str(torch.cuda.get_device_properties(device).uuid), os.getpid())


def process_bytes(uuid: str, pid: int) -> int | None:
    """Bytes that a process holds on a GPU, as the driver reports. None if the driver does not know
    the process, for example from within a pid namespace."""
    library = nvml()
    if library is None:
        return None
    try:
        library.nvmlInit()
        try:
            handle = library.nvmlDeviceGetHandleByUUID(_full(uuid))
            running = [
                *library.nvmlDeviceGetComputeRunningProcesses(handle),
                *_mps_clients(library, handle),
            ]
        finally:
            library.nvmlShutdown()
    except library.NVMLError:
        return None
    held = [one.usedGpuMemory for one in running if one.pid == pid]
    return max((size for size in held if size is not None), default=None)


def nvml() -> Any:
    """NVML's Python bindings: vLLM's copy, else nvidia-ml-py; None without either."""
    for name in _NVML:
        with suppress(ImportError):
            return importlib.import_module(name)
    return None


def _mps_clients(library: Any, handle: Any) -> list[Any]:
    """MPS clients, which have a separate list that some drivers and bindings lack."""
    try:
        return list(library.nvmlDeviceGetMPSComputeRunningProcesses(handle))
    except (AttributeError, library.NVMLError):
        return []


def _full(uuid: str) -> str:
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _tensors(caches: Any) -> list[torch.Tensor]:
    """KV tensors of all layers; some backends have several tensors per layer."""
    found: list[torch.Tensor] = []
    for cache in caches:
        found += [cache] if isinstance(cache, torch.Tensor) else _tensors(cache)
    return found


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, int]:
    """Bytes by storage address; layers may share a storage."""
    storages = [one.untyped_storage() for one in tensors if one.device.type == device.type]
    return {one.data_ptr(): one.nbytes() for one in storages if one.nbytes()}


def _graphs_bytes(segments: Iterable[dict[str, Any]], device: torch.device, known: set[int]) -> int:
    """Bytes of private pools without weights and KV, which have pools too in sleep mode."""
    total = 0
    for segment in segments:
        start, size = segment["address"], segment["total_size"]
        private = tuple(segment.get("segment_pool_id", _DEFAULT_POOL)) != _DEFAULT_POOL
        own = device.index is None or segment["device"] == device.index
        if private and own and not any(start <= one < start + size for one in known):
            total += size
    return total
