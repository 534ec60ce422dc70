"""Cost of sharing a GPU, for production: `python -m benchmarks.gpu_slot --json PATH`.

Needs torch and a CUDA device, no vLLM. Without a device, or with --tiny, the same code runs on CPU
tensors of tiny shapes: a rehearsal with void figures. See README.md beside this file.
"""

import argparse
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.gpu_slot.part_runs import PartRuns, Status
from benchmarks.gpu_slot.parts import PARTS
from benchmarks.testbed.reporting import report
from harvester.contracts.clock import MonotonicClock, wall_time_utc

_DRIVER = "name,driver_version,memory.total,compute_mode"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_slot", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--only", choices=[part.name for part in PARTS], nargs="+", help="these parts"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for the whole run")
    parser.add_argument("--tiny", action="store_true", help="the rehearsal's shapes, on a GPU too")
    given = parser.parse_args()
    # Ended by force in good order: the part's processes and directories go too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = report("gpu_slot", lambda: measured(given), given.json, engines=False)
    failed = [n for n, part in result["parts"].items() if part["status"] not in _GOOD]
    if failed:
        sys.exit(f"benchmarks.gpu_slot: not measured: {', '.join(failed)}")


_GOOD = (Status.MEASURED, Status.NOT_HERE)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    # This process never makes a CUDA context: it would take turns with the measured ones.
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    clock = MonotonicClock()
    runs = PartRuns(
        kind=kind,
        tiny=given.tiny or kind == "cpu",
        path=given.json,
        clock=clock,
        until_s=clock.now() + 60.0 * given.minutes,
    )
    if kind == "cpu":
        print("no CUDA device: a rehearsal, of which no figure counts", file=sys.stderr, flush=True)
    parts = [part for part in PARTS if given.only is None or part.name in given.only]
    machine = {"rehearsal": runs.tiny, "started": wall_time_utc(), "machine": _machine(kind)}
    return runs.run(parts, machine)


def _machine(kind: str) -> dict[str, Any]:
    return {
        "gpu": _driver() if kind == "cuda" else "",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": psutil.virtual_memory().total >> 30,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
    }


def _driver() -> str:
    query = ["nvidia-smi", f"--query-gpu={_DRIVER}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, timeout=20.0, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return done.stdout.decode(errors="replace").strip()


if __name__ == "__main__":
    main()
