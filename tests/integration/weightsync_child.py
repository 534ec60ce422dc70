"""Runs one process of engines for tests of weightsync, and reads its report."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coserve.vllm.launch import NO_COMPILER
from tests.integration.forked_program import output_of

_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def own_temporaries() -> Iterator[Path]:
    """A directory for TMPDIR; at the end it is removed, with the shared memory of ranks that met in
    it.

    On a CPU vLLM's ranks share memory under the name of the file by which they met. Its executor
    kills them, and nothing else removes it.
    """
    # Not below a test's directory: a socket's path has at most 107 bytes.
    found = Path(tempfile.mkdtemp(prefix="rosemux-"))
    try:
        yield found
    finally:
        for met in found.glob("vllm_dist_*"):
            for segment in _SHARED_MEMORY.glob(f"{met.name}-*"):
                segment.unlink(missing_ok=True)
        shutil.rmtree(found, ignore_errors=True)


def run_child(module: str, root: Path, *arguments: str, timeout_s: float = 400) -> dict[str, Any]:
    """`seen.json` of a module that was given a directory; the stores are in `stores` below it."""
    (root / "stores").mkdir()
    environment = {
        "ROSEMUX_WEIGHT_ROOT": str(root / "stores"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **NO_COMPILER,
    }
    command = ("-m", module, str(root), *arguments)
    with own_temporaries() as temporaries:
        environment["TMPDIR"] = str(temporaries)
        output_of(*command, log=root / "child.log", env=environment, timeout_s=timeout_s)
    result: dict[str, Any] = json.loads((root / "seen.json").read_text())
    return result
