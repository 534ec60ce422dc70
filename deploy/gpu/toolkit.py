"""Finds this machine's CUDA: the driver's library to link with, and the toolkit's headers.

Looks at files and at the loader's cache; loads nothing and changes nothing.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from deploy.gpu.parts import BundleRefused

DRIVER = "libcuda.so.1"
HEADER = "include/cuda_runtime.h"
SYSTEM = Path("/")
_TIMEOUT_S = 20.0


def loader_cache() -> str:
    """Output of `ldconfig -p`; "" if the program is missing or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["/sbin/ldconfig", "-p"],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        ).stdout
    return ""


def driver_library(
    environment: Mapping[str, str], cache: str, *, system: Path = SYSTEM
) -> Path | None:
    """The library that `-lcuda` can be linked with: the driver's own, else a toolkit's stub."""
    local = system / "usr/local"
    folders = [Path(name) for name in environment.get("LD_LIBRARY_PATH", "").split(":") if name]
    folders += [local / "nvidia/lib64", local / "nvidia/lib"]
    folders += sorted(local.glob("cuda*/compat"), reverse=True)
    candidates = [*_cached(cache), *(folder / DRIVER for folder in folders)]
    folders += [Path(name) for name in environment.get("LIBRARY_PATH", "").split(":") if name]
    for stubs in ("cuda*/lib64/stubs", "cuda*/targets/*/lib/stubs"):
        folders += sorted(local.glob(stubs), reverse=True)
    candidates += [folder / "libcuda.so" for folder in folders]
    return next((path for path in candidates if path.is_file()), None)


def toolkit_home(
    environment: Mapping[str, str], nvcc: str | None, *, system: Path = SYSTEM
) -> Path:
    """CUDA_HOME: the toolkit with the headers. Raises BundleRefused where there is none.

    torch takes the folder above nvcc's, which for a wrapper in /usr/local/bin has no headers.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if value := environment.get(name):
            if (Path(value) / HEADER).is_file():
                return Path(value)
            raise BundleRefused(f"{name} is {value}, which has no {HEADER}")
    local = system / "usr/local"
    candidates: list[Path] = [Path(nvcc).resolve().parents[1]] if nvcc else []
    candidates += [local / "cuda", *sorted(local.glob("cuda-*"), reverse=True)]
    for home in candidates:
        if (home / HEADER).is_file():
            return home
    tried = ", ".join(dict.fromkeys(map(str, candidates)))
    raise BundleRefused(f"no CUDA headers: no {HEADER} in {tried}; set CUDA_HOME")


def compiler(environment: Mapping[str, str], variable: str, names: Iterable[str]) -> str | None:
    """The program that the variable names, else the first of `names` that is there."""
    path = environment.get("PATH", os.defpath)
    # A variable may hold arguments too: "ccache g++".
    asked = environment.get(variable, "").split()[:1] or list(names)
    return next((found for name in asked if (found := shutil.which(name, path=path))), None)


def _cached(cache: str) -> list[Path]:
    """Paths of the 64-bit driver's library in `ldconfig -p`."""
    found = []
    for line in cache.splitlines():
        name, _, rest = line.strip().partition(" ")
        kind, arrow, path = rest.partition(" => ")
        if name == DRIVER and arrow and "64" in kind:
            found.append(Path(path))
    return found
