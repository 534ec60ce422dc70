"""Runs one process of engines for tests of weightsync, and reads its report."""

import json
from pathlib import Path
from typing import Any

from coserve.vllm.launch import NO_COMPILER
from tests.integration.forked_program import output_of


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
    output_of(*command, log=root / "child.log", env=environment, timeout_s=timeout_s)
    result: dict[str, Any] = json.loads((root / "seen.json").read_text())
    return result
