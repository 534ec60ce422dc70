"""Gain of two jobs on two nodes from phase permits: `python -m benchmarks.multiplex --json PATH`.

Two real RL jobs of different length on a rollout node (core 0, vLLM) and a training node (core 1),
on Ray: one after the other, both at once, multiplexed by permits, and that with a harvested lease
of a serving node (core 1 too) as third resource. See README.md beside this.
"""

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.multiplex.arms import MultiplexArm
from benchmarks.multiplex.rounds import MultiplexBench
from benchmarks.testbed.bursts import trace_of
from benchmarks.testbed.parts import Parts
from benchmarks.testbed.processes import Processes
from benchmarks.testbed.reporting import report
from benchmarks.testbed.run_directory import run_directory
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError

_OBJECT_STORE_BYTES = 80 << 20
_SEED = 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.multiplex", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4, help="of the large job, in each arm")
    parser.add_argument("--rounds", type=int, default=1, help="of all arms, interleaved")
    parser.add_argument(
        "--arms",
        nargs="+",
        type=MultiplexArm,
        choices=list(MultiplexArm),
        default=list(MultiplexArm),
        help="which of them",
    )
    parser.add_argument("--trace", type=Path, help="production's; else bursts of our generator")
    parser.add_argument("--cache", type=Path, help="where the warm policy is kept between runs")
    given = parser.parse_args()
    if given.steps < 1 or given.rounds < 1:
        parser.error("--steps and --rounds are at least 1")
    report("multiplex", lambda: measured(given), given.json)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("benchmarks.multiplex needs Ray: install the extra 'ray'") from error
    trace = trace_of(given.trace, seed=_SEED)
    arms = tuple(arm for arm in MultiplexArm if arm in given.arms)
    out = given.json.parent / f"{given.json.stem}.run"
    cache = given.cache or out / "cache"
    with run_directory(out, cache=cache) as paths, Processes(paths.logs) as processes:
        ray.init(
            num_cpus=2,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
        )
        # Ray takes the signal over, and ends without a word.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            parts = Parts(processes=processes, paths=paths, clock=MonotonicClock())
            bench = MultiplexBench(parts, trace, arms=arms, rounds=given.rounds, steps=given.steps)
            try:
                return asyncio.run(bench.run())
            except BaseException:
                print(f"{len(bench.done)} arms were done", file=sys.stderr)
                raise
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
