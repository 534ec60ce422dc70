"""In-engine apply beside vLLM's own: `python -m benchmarks.weightsync.engine --json PATH`.

One real vLLM engine in a process of its own (100 M parameters, bfloat16, two threads) follows a
store with our backend. Between two of our updates vLLM's native sparse path applies the same kind
of step (Adam's at lr 1e-6, one value in a hundred) to the same model and takes it back, so that
both meet the same machine. Needs no GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.reporting import report
from harvester.contracts.errors import Unsupported

REPETITIONS = 7
_TIMEOUT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync.engine", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    given = parser.parse_args()
    report("weightsync.engine", lambda: measure(repetitions=given.repetitions), given.json)


def measure(*, repetitions: int = REPETITIONS) -> dict[str, Any]:
    """Medians, in milliseconds but for `params` and `changed_ratio`; `spread_ms` has the extremes.

    `ours_ms`    the update: deltas written, packed forms exchanged, all of the state hashed
    `pause_ms`   the same with the calls that begin and end it: what the engine cannot step for
    `native_ms`  vLLM's own sparse path, which checks indices but no state and packs nothing
    `stage_ms`   what was done before the pause: read, decoded, rehearsed, packed
    `unstaged_pause_ms`  the pause where nothing was done before it

    Raises Unsupported where the engine does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="rosemux-engine-") as directory:
        root = Path(directory)
        (root / "stores").mkdir()
        environment = os.environ | {
            "ROSEMUX_WEIGHT_ROOT": str(root / "stores"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "2",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        module = "benchmarks.weightsync.engine_arms"
        done = subprocess.run(
            [sys.executable, "-m", module, str(root), str(repetitions)],
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise Unsupported(f"the engine ended with {done.returncode}: {done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads((root / "result.json").read_text())
        return result


if __name__ == "__main__":
    main()
