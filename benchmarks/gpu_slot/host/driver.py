"""GPUs as nvidia-smi, NVML and torch see them, and whether `coserve.guest.gpus` reads the same."""

import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from benchmarks.gpu_slot.spread import spread
from coserve.guest.gpus import ComputeMode, gpus
from coserve.vllm.memory_report import nvml
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import Unsupported

_TIMEOUT_S = 20.0
_TEXT_CHARS_MAX = 2000
_QUERIED = (
    "Driver Version",
    "CUDA Version",
    "Product Name",
    "Persistence Mode",
    "Compute Mode",
    "GPU UUID",
    "Virtualization Mode",
)
"""Keys of `nvidia-smi -q` that are kept."""
_NVML_MODES = {
    0: ComputeMode.DEFAULT,
    2: ComputeMode.PROHIBITED,
    3: ComputeMode.EXCLUSIVE_PROCESS,
}
"""nvmlComputeMode_t; 1 was Exclusive_Thread."""
_MPS_PROGRAMS = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")


def nvidia_smi(*, calls: int, texts: bool, command: str = "nvidia-smi") -> dict[str, Any]:
    """`gpus()` as a guest's start calls it, and its seconds; with `texts`, nvidia-smi's own too."""
    taken_s: list[float] = []
    for _ in range(calls):
        began_ns = monotonic_ns()
        found = gpus(command)
        taken_s.append((monotonic_ns() - began_ns) * 1e-9)
    result: dict[str, Any] = {
        "gpus": [{"uuid": one.uuid, "compute_mode": one.compute_mode} for one in found],
        "first_call_s": taken_s[0],
        "call_s": spread(taken_s),
    }
    if found and texts:
        query = ("--query-gpu=uuid,compute_mode", "--format=csv,noheader")
        result["csv"] = _output(command, *query)[:_TEXT_CHARS_MAX]
        result["list"] = _output(command, "-L")[:_TEXT_CHARS_MAX]
        result["full"] = queried(_output(command, "-q"))
    return result


def queried(text: str) -> dict[str, list[str]]:
    """Values of the kept keys in `nvidia-smi -q`, in their order: one for each GPU, or one."""
    kept: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() in _QUERIED:
            kept.setdefault(key.strip(), []).append(value.strip())
    return kept


def nvml_device() -> dict[str, Any]:
    """The first GPU by NVML, and which forms of its UUID NVML takes."""
    library = nvml()
    if library is None:
        return {"not_here": "no NVML bindings"}
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return {"not_here": str(error)}
    try:
        return _of_first(library)
    finally:
        library.nvmlShutdown()


def _of_first(library: Any) -> dict[str, Any]:
    def value_of(call: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or the library's error as text: not every GPU knows every question."""
        try:
            return call(*arguments)
        except library.NVMLError as error:
            return f"NVML: {error}"

    count = library.nvmlDeviceGetCount()
    handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    uuids = [library.nvmlDeviceGetUUID(handle) for handle in handles]
    first, bare = handles[0], uuids[0].removeprefix("GPU-")
    mode = value_of(library.nvmlDeviceGetComputeMode, first)
    return {
        "bindings": library.__name__,
        "uuids": uuids,
        "uuid_with_prefix_taken": _taken(library, f"GPU-{bare}"),
        "uuid_without_prefix_taken": _taken(library, bare),
        "compute_mode_number": mode,
        "compute_mode": _NVML_MODES.get(mode, "not known"),
        "persistence_mode": value_of(library.nvmlDeviceGetPersistenceMode, first),
        "pcie_generation": value_of(library.nvmlDeviceGetCurrPcieLinkGeneration, first),
        "pcie_width": value_of(library.nvmlDeviceGetCurrPcieLinkWidth, first),
        "sm_clock_mhz": value_of(library.nvmlDeviceGetClockInfo, first, library.NVML_CLOCK_SM),
        "memory_clock_mhz": value_of(library.nvmlDeviceGetClockInfo, first, library.NVML_CLOCK_MEM),
        "processes": len(library.nvmlDeviceGetComputeRunningProcesses(first)),
    }


def _taken(library: Any, uuid: str) -> bool:
    try:
        library.nvmlDeviceGetHandleByUUID(uuid)
    except library.NVMLError:
        return False
    return True


def agreement(kind: str, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The GPU's name and compute mode, as `gpus()` read them against every other source.

    `found` has the reports of `nvidia_smi` and `nvml_device`. Raises Unsupported if a source is
    missing on a machine with a GPU.
    """
    nvidia_smi, by_nvml = found["nvidia_smi_without_context"], found["nvml"]
    if kind != "cuda":
        return {"not_here": "no GPU"}
    if not nvidia_smi.get("gpus") or not by_nvml.get("uuids"):
        raise Unsupported("nvidia-smi or NVML names no GPU, where torch has one")
    first = nvidia_smi["gpus"][0]
    by_torch = str(torch.cuda.get_device_properties(0).uuid)
    full: dict[str, list[str]] = nvidia_smi["full"]
    return {
        "torch_uuid": by_torch,
        "uuid_as_nvml": first["uuid"] == by_nvml["uuids"][0],
        "uuid_as_torch": first["uuid"] == f"GPU-{by_torch.removeprefix('GPU-')}",
        "uuid_as_full_text": [first["uuid"]] == full.get("GPU UUID", [])[:1],
        "uuid_in_list": first["uuid"] in nvidia_smi["list"],
        "compute_mode_as_nvml": first["compute_mode"] == by_nvml["compute_mode"],
        "compute_mode_as_full_text": [first["compute_mode"]] == full.get("Compute Mode", [])[:1],
    }


def mps_programs() -> dict[str, Any]:
    """Paths of MPS's programs, and the version by the daemon's; starts nothing."""
    found: dict[str, Any] = {name: shutil.which(name) for name in _MPS_PROGRAMS}
    control = found[_MPS_PROGRAMS[0]]
    if control is not None:
        found["version"] = ""
        with suppress(OSError, subprocess.TimeoutExpired):
            found["version"] = _output(control, "-v")[:_TEXT_CHARS_MAX].strip()
    return found


def _output(*command: str) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done.stdout.decode(errors="replace")
