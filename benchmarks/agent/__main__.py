"""`python -m benchmarks.agent --json PATH`: what the node agent costs, how fast it closes a grant,
whether faults ever make it lend what it must not, and how good its forecast is.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.agent.cost import cost, scale
from benchmarks.agent.expiries import expiries
from benchmarks.agent.faults import convicted, faults
from benchmarks.agent.forecast import BUSY_RATIO, forecast
from benchmarks.agent.kill import kill
from benchmarks.agent.reaction import reaction
from benchmarks.testbed.partial_result import PartialResult
from benchmarks.testbed.reporting import report

PARTS = ("cost", "reaction", "kill", "scale", "expiries", "faults", "forecast")
_TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.agent", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", choices=PARTS, nargs="+", help="parts; all of them by default")
    parser.add_argument("--quick", action="store_true", help="a tenth of the trials")
    parser.add_argument("--window", type=float, help="seconds of `expiries`")
    parser.add_argument("--virtual", type=int, help="virtual scenarios of `faults`")
    parser.add_argument("--real", type=int, help="real ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for files of convicted scenarios")
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        help="a trace of `forecast`; repeatable; by default all in ../shared/traces",
    )
    parser.add_argument(
        "--busy",
        type=float,
        default=BUSY_RATIO,
        help="share of the time for which a trace keeps the engine of `forecast` busy",
    )
    given = parser.parse_args()
    given.trace = given.trace or sorted(_TRACES.glob("*.csv*"))
    if "forecast" in (given.only or PARTS) and not given.trace:
        parser.error(
            "forecast needs --trace FILE: there is no ../shared/traces beside the checkout"
        )
    if not 0 < given.busy < 1:
        parser.error("--busy must lie between 0 and 1")
    found = report("agent", lambda: measured(given), given.json, engines=False)
    if "faults" in found and (reasons := convicted(found["faults"])):
        sys.exit(f"faults: {reasons}")


def measured(given: argparse.Namespace) -> dict[str, Any]:
    share = 0.1 if given.quick else 1.0
    virtual = given.virtual if given.virtual is not None else round(2000 * share)
    real = given.real if given.real is not None else round(50 * share)
    parts: dict[str, tuple[str, Callable[[], Any]]] = {
        "cost": ("cost", lambda: cost(windows=max(1, round(10 * share)))),
        "reaction": ("reaction_ms", lambda: reaction(share=share)),
        "kill": ("kill_s", lambda: kill(share=share)),
        "scale": ("scale_16_engines", lambda: scale(windows=max(1, round(10 * share)))),
        "expiries": (
            "spurious_expiries_per_day",
            lambda: expiries(window_s=given.window or 600.0 * share),
        ),
        "faults": (
            "faults",
            lambda: faults(virtual=virtual, real=real, seed=given.seed, keep=given.keep),
        ),
        "forecast": (
            "forecast",
            lambda: forecast(given.trace, busy_ratio=given.busy, hours=2 * share, seed=given.seed),
        ),
    }
    partial = PartialResult(given.json)
    for part in given.only or PARTS:
        name, measure = parts[part]
        partial.keep({name: measure()})
    return partial.found


if __name__ == "__main__":
    main()
