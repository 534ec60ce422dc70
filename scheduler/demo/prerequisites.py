"""What the demo needs of the machine, checked before anything starts, each with what to do."""

import os
import socket
from importlib import metadata
from pathlib import Path

import psutil

from coserve.vllm.capabilities import capabilities, installed_vllm_version
from harvester.contracts.errors import ConfigError, Unsupported

MEMORY_BYTES = 12 << 30
SHARED_MEMORY_BYTES = 1 << 28
CORES = 2


def check_machine() -> None:
    """Raises ConfigError or Unsupported, naming what is missing and what to do."""
    if not Path("/proc/cpuinfo").exists():
        raise Unsupported("the demo needs Linux")
    _check_instructions()
    cores = len(os.sched_getaffinity(0))
    if cores < CORES:
        raise ConfigError(f"the demo needs {CORES} cores, this process may use {cores}")
    free = psutil.virtual_memory().available
    if free < MEMORY_BYTES:
        raise ConfigError(
            f"the demo needs {MEMORY_BYTES >> 30} GiB of free memory, {free / 2**30:.1f} GiB are "
            "free; end other programs or take a larger machine"
        )
    shared = os.statvfs("/dev/shm")
    if shared.f_bavail * shared.f_frsize < SHARED_MEMORY_BYTES:
        raise ConfigError(
            f"/dev/shm has less than {SHARED_MEMORY_BYTES >> 20} MiB free; enlarge it "
            "(mount -o remount,size=2g /dev/shm; in a container --shm-size=2g)"
        )
    capabilities(installed_vllm_version())
    for name in ("torchvision", "torchaudio", "torchcodec"):
        _check_absent(name)


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _check_instructions() -> None:
    flags = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in line), ""
    )
    if "avx512f" not in flags and "avx2" not in flags:
        raise Unsupported(
            "vLLM on a CPU needs AVX-512 or AVX2, which this processor does not have; "
            "run on another machine"
        )


def _check_absent(name: str) -> None:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return
    if "+cpu" not in version:
        raise ConfigError(
            f"{name} {version} needs CUDA libraries and breaks transformers without them; "
            f"serving text does not need it: pip uninstall {name} (or make setup)"
        )
