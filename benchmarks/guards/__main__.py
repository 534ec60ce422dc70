"""Operating characteristics of a slot's guards: `python -m benchmarks.guards --json PATH`.

The guards that the agent runs, with shipped defaults, over requests of a known service: how soon
harm is found, how often a harmless guest is stopped. No engine and no clock: a day takes seconds.
"""

import argparse
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.guards.services import SERVICES, Service
from benchmarks.guards.simulated_slot import run
from benchmarks.guards.traced_engine import TracedService, traced_services
from benchmarks.testbed.kept_result import kept_result
from benchmarks.testbed.reporting import report
from benchmarks.testbed.trace import read_trace

Named = dict[str, Service | TracedService]
Task = tuple[str, int]
"""Name of a service, and seed."""


@cache
def services(traces: tuple[Path, ...]) -> Named:
    """All services, those of the traces too; each process makes its own."""
    made: Named = dict(SERVICES)
    for path in traces:
        made |= traced_services(read_trace(path))
    return made


def _run_named(traces: tuple[Path, ...], directory: Path | None, task: Task) -> dict[str, Any]:
    name, seed = task
    file = f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}-{seed}.json"
    path = None if directory is None else directory / file
    return kept_result(path, lambda: run(services(traces)[name], seed), dict[str, Any])


def summary(named: Named, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {name: _summary(each, harmful=named[name].harmful) for name, each in runs.items()}


def _summary(runs: Sequence[dict[str, Any]], *, harmful: bool) -> dict[str, Any]:
    """A stop before harm began, or in a run without harm, is a false one."""
    false = [one for one in runs if one["stopped_by"] and not (harmful and one["after_min"] > 0)]
    found: dict[str, Any] = {
        "runs": len(runs),
        "stopped_by": dict(Counter(one["stopped_by"] for one in runs if one["stopped_by"])),
        "false_stops": len(false),
        "withheld_share": statistics.mean(one["withheld_share"] for one in runs),
    }
    if not harmful:
        days = sum(one["days"] for one in runs)
        return found | {
            "days": days,
            "halvings_a_day": sum(one["halvings"] for one in runs) / days,
            "withheld_hours": [
                round(statistics.mean(hour), 3)
                for hour in zip(*[one["withheld_hours"] for one in runs], strict=True)
            ],
            "tokens_lost_share": statistics.mean(one["tokens_lost_share"] for one in runs),
        }
    # A run that found nothing counts as longer than any.
    after = sorted(
        one["after_min"] if one["stopped_by"] else math.inf for one in runs if one not in false
    )
    for share in (0.5, 0.9):
        found[f"found_after_min_p{share * 100:.0f}"] = after[int(share * len(after))]
    halved = sorted(
        math.inf if one["halved_after_s"] is None else one["halved_after_s"] for one in runs
    )
    return found | {
        "found_after_min_longest": after[-1],
        "level_halved_after_s_p50": halved[len(halved) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--trace", type=Path, nargs="+", default=[], help="traces that simulated engines serve too"
    )
    parser.add_argument("--only", help="services whose name has this text")
    parser.add_argument("--runs", type=int, help="of each service, instead of its own number")
    parser.add_argument("--resume", type=Path, help="directory of runs that are kept")
    parser.add_argument("--workers", type=int, help="processes side by side, one a core by default")
    arguments = parser.parse_args()
    traces = tuple(arguments.trace)
    # The first run of each service first: a piece then tells of all of them.
    tasks = sorted(
        (
            (name, seed)
            for name, service in services(traces).items()
            if not arguments.only or arguments.only in name
            for seed in range(arguments.runs or service.runs)
        ),
        key=itemgetter(1),
    )
    if not tasks:
        parser.error(f"--only: no service has {arguments.only!r} in its name")
    resume: Path | None = arguments.resume
    if resume is not None:
        resume.mkdir(parents=True, exist_ok=True)
    report(
        "guards",
        lambda: measured(tasks, traces, resume, arguments.workers),
        arguments.json,
        engines=False,
    )


def measured(
    tasks: list[Task], traces: tuple[Path, ...], resume: Path | None, workers: int | None
) -> dict[str, Any]:
    """`resume`: directory of runs of earlier pieces of the same code, which gets the others."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in tasks}
    with ProcessPoolExecutor(workers) as executor:
        found = executor.map(partial(_run_named, traces, resume), tasks)
        for (name, _), one in zip(tasks, found, strict=True):
            runs[name].append(one)
    return {"summary": summary(services(traces), runs), "runs": runs}


if __name__ == "__main__":
    main()
