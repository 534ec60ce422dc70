"""Facts of a GPU machine, in a line each: driver, GPU, memory, MPS, compilers.

Facts, no verdicts: what is missing is reported as "not here". Needs nothing but Python.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.gpu import toolkit

NO_DRIVER = f"no NVIDIA driver here: {toolkit.DRIVER} not found"
NOT_HERE = "not here"
_TIMEOUT_S = 20.0
_TEXT_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class Fact:
    subject: str
    text: str

    def __str__(self) -> str:
        return f"fact     {self.subject}: {self.text}"


def driver_version(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> str:
    """The newest CUDA version that the driver supports, for example "13.0"; empty without a
    driver.
    """
    try:
        library = load(toolkit.DRIVER)
    except OSError:
        return ""
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        return "of an unknown version"
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def facts(
    environment: Mapping[str, str],
    *,
    memory: Path = Path("/proc/meminfo"),
    shared_memory: Path = Path("/dev/shm"),
) -> Iterator[Fact]:
    """All but the driver, in the order in which they are read."""
    path = environment.get("PATH", os.defpath)
    yield Fact("GPU", gpu_names(shutil.which("nvidia-smi", path=path)))
    yield Fact("free host memory", _available(memory))
    yield Fact("free in /dev/shm", _free(shared_memory))
    for program in ("nvidia-cuda-mps-control", "nvcc"):
        yield Fact(program, shutil.which(program, path=path) or NOT_HERE)
    found = toolkit.compiler(environment, "CC", ("cc", "gcc", "clang"))
    yield Fact("C compiler", found or NOT_HERE)


def gpu_names(program: str | None) -> str:
    """Names as `nvidia-smi` says them, or why it says none."""
    if program is None:
        return "not known: nvidia-smi is not here"
    command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {_short(str(error))}"
    if done.returncode:
        return f"not known: nvidia-smi says {_short(done.stdout + done.stderr)}"
    return _short("; ".join(done.stdout.splitlines())) or "none, says nvidia-smi"


def _available(memory: Path) -> str:
    try:
        for line in memory.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return f"{int(value.split()[0]) / 2**20:.1f} GiB"
    except (OSError, ValueError, IndexError):
        pass
    return "not known"


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB"
    except OSError:
        return NOT_HERE


def _short(text: str) -> str:
    return " ".join(text.split())[:_TEXT_CHARS_MAX]
