"""Copy rates, pinning and launch times: the machine's facts that other parts' figures stand on."""

from typing import Any

import torch

from benchmarks.gpu_slot.device import Device, Work
from benchmarks.gpu_slot.spread import spread
from harvester.contracts.clock import monotonic_ns

_SIZES_BYTES = (64 << 10, 2 << 20, 64 << 20, 1 << 30)
_TINY_SIZES_BYTES = (4 << 10, 64 << 10)
_REPEATS = 7
_LAUNCHES = 500
_PINNED_BYTES = 2 << 30


def shape_of(device: Device) -> dict[str, Any]:
    """The GPU's own figures, as torch has them."""
    if device.torch_device.type != "cuda":
        return {"name": device.name}
    known = torch.cuda.get_device_properties(device.torch_device)
    return {
        "name": device.name,
        "compute_capability": f"{known.major}.{known.minor}",
        "multiprocessors": known.multi_processor_count,
        "l2_bytes": known.L2_cache_size,
        "memory_bytes": known.total_memory,
        "free_bytes": device.free_bytes(),
    }


def rates(device: Device, kind: str, *, tiny: bool) -> dict[str, Any]:
    """GB/s of payload by size: device to device, and pinned host memory to and from it."""
    sizes = _TINY_SIZES_BYTES if tiny else _SIZES_BYTES
    pinned = kind == "cuda"
    host = torch.ones(sizes[-1], dtype=torch.uint8, pin_memory=pinned)
    first = torch.ones(sizes[-1], dtype=torch.uint8, device=device.torch_device)
    second = torch.empty_like(first)
    found: dict[str, Any] = {"pinned": pinned}
    ways = {
        "device_to_device": (first, second),
        "host_to_device": (host, second),
        "device_to_host": (first, host),
    }
    for way, (source, to) in ways.items():
        found[way] = {str(size): _rate(device, source[:size], to[:size]) for size in sizes}
    return found


def _rate(device: Device, source: torch.Tensor, to: torch.Tensor) -> dict[str, Any]:
    def copy() -> None:
        to.copy_(source, non_blocking=True)

    taken_s = _timed(device, copy, _REPEATS)
    return {
        "gb_per_s": spread([1e-9 * source.nbytes / one for one in taken_s]),
        "us": spread([1e6 * one for one in taken_s]),
    }


def pinning(kind: str, *, tiny: bool) -> dict[str, Any]:
    """Seconds for new pinned host memory, as a first sleep takes it, and once more from torch."""
    size_bytes = _TINY_SIZES_BYTES[-1] if tiny else _PINNED_BYTES
    taken_s = []
    for _ in range(2):
        began_ns = monotonic_ns()
        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=kind == "cuda")
        taken_s.append((monotonic_ns() - began_ns) * 1e-9)
        del host
    return {
        "bytes": size_bytes,
        "first_s": taken_s[0],
        "again_s": taken_s[1],
        "first_gb_per_s": 1e-9 * size_bytes / taken_s[0],
    }


def launches(device: Device, *, tiny: bool) -> dict[str, Any]:
    """Microseconds of the smallest graph: one kernel on one element."""
    element = torch.zeros(1, device=device.torch_device)

    def work() -> None:
        element.add_(1.0)

    replay = device.captured(work)
    count = 20 if tiny else _LAUNCHES
    device.synchronize()
    began_ns = monotonic_ns()
    for _ in range(count):
        replay()
    launched_ns = monotonic_ns()
    device.synchronize()
    ended_ns = monotonic_ns()
    return {
        "graph_and_wait_us": spread([1e6 * one for one in _timed(device, replay, count)]),
        "graph_us_back_to_back": (ended_ns - began_ns) * 1e-3 / count,
        "host_us_back_to_back": (launched_ns - began_ns) * 1e-3 / count,
        "kernel_and_wait_us": spread([1e6 * one for one in _timed(device, work, count)]),
        "wait_without_work_us": spread([1e6 * one for one in _timed(device, _nothing, count)]),
    }


def _nothing() -> None:
    """Work that launches nothing."""


def _timed(device: Device, work: Work, repeats: int) -> list[float]:
    """Seconds of each repeat, from the launch to the end of the launched work."""
    work()
    device.synchronize()
    taken_s = []
    for _ in range(repeats):
        began_ns = monotonic_ns()
        work()
        device.synchronize()
        taken_s.append((monotonic_ns() - began_ns) * 1e-9)
    return taken_s
