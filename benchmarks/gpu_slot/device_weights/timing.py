"""Seconds and bytes of work on a device that may go on after its call has returned."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

_RUNS = 3
Work = Callable[[], object]


def seconds_of(device: torch.device, work: Work) -> float:
    """Seconds of `work`, from a device at rest to a device at rest."""
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def median_s(device: torch.device, work: Work, *, runs: int = _RUNS) -> float:
    """Median seconds, after one uncounted run if there are several."""
    if runs > 1:
        work()
    return median(seconds_of(device, work) for _ in range(runs))


def rate(size_bytes: int, seconds: float) -> float:
    """GB/s."""
    return size_bytes / seconds / 1e9


def speeds(seconds: Sequence[float], size_bytes: int, payload_bytes: int) -> dict[str, float]:
    """The first run apart, which compiles and allocates; the median of the others."""
    usual = median(seconds[1:])
    return {
        "first_s": seconds[0],
        "s": usual,
        "state_gb_per_s": rate(size_bytes, usual),
        "payload_gb_per_s": rate(payload_bytes, usual),
    }


def restart_most_bytes(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def most_bytes(device: torch.device) -> int:
    """Peak of allocated device bytes since the reset; 0 without an allocator that counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
