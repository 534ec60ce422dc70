"""Machine and versions of a measurement: pieces of one figure must have them in common."""

import hashlib
import os
import platform
import subprocess
from pathlib import Path

import msgspec
import psutil

from coserve.vllm.capabilities import installed_vllm_version

_ROOT = Path(__file__).parents[2]
_CPU_INFO = Path("/proc/cpuinfo")


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    processor: str
    cores: int
    memory_gib: int
    kernel: str
    accelerator: str
    """Name of the GPU as its driver says; "" for CPU engines."""
    vllm: str
    commit: str
    """The checkout's, with a digest of its changes if it has any; "" outside of a checkout."""


def origin(accelerator: str = "") -> Origin:
    named = [line for line in _CPU_INFO.read_text().splitlines() if line.startswith("model name")]
    return Origin(
        processor=" ".join(named[0].partition(":")[2].split()) if named else "",
        cores=len(os.sched_getaffinity(0)),
        memory_gib=psutil.virtual_memory().total >> 30,
        kernel=platform.release(),
        accelerator=accelerator,
        vllm=installed_vllm_version(),
        commit=_commit(),
    )


def _commit() -> str:
    head, changes = _git("rev-parse", "HEAD"), _git("diff", "HEAD", "--", "*.py")
    digest = hashlib.sha256(changes).hexdigest()[:12]
    return head.decode().strip() + (f"+{digest}" if changes else "")


def _git(*arguments: str) -> bytes:
    """Output of the command; empty where there is no checkout."""
    try:
        return subprocess.run(
            ("git", *arguments), cwd=_ROOT, capture_output=True, check=False
        ).stdout
    except FileNotFoundError:
        return b""
