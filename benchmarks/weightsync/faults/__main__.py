"""`python -m benchmarks.weightsync.faults --json PATH`: seeded faults over publish and receive.

Each fault strikes a store, a holder or a process, is judged, is removed, and the holder has to
reach the newest version by itself. Ends with 1 if one does not, or makes a false claim.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.testbed.reporting import report
from benchmarks.weightsync.faults import measure
from harvester.contracts.clock import MonotonicClock


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync.faults", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    clock = MonotonicClock()
    started_s = clock.now()

    def on_progress(message: str) -> None:
        print(f"{clock.now() - started_s:6.0f} s  {message}", file=sys.stderr, flush=True)

    def measured() -> dict[str, Any]:
        result = measure(given.seed, given.count, on_progress=on_progress)
        return result | {"seconds": round(clock.now() - started_s, 1)}

    result = report("weightsync.faults", measured, given.json, engines=False)
    sys.exit(result["recovered"] != result["tried"] or result["wrong_state"] > 0)


if __name__ == "__main__":
    main()
