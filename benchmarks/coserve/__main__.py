"""Effect of the guest on production: `python -m benchmarks.coserve --trace FILE --json PATH`.

Real engines on one slot, as in the demo; rollouts without end on the guest. Nine arms take turns
in one run, with the same requests in each round. See README.md beside this file.
"""

import argparse
import asyncio
import math
import signal
from pathlib import Path
from typing import Any

from benchmarks.coserve.arms import ESSENTIAL, Arm, arms_on
from benchmarks.coserve.bench import Bench, length_of
from benchmarks.coserve.round_log import RoundLog, RunSettings
from benchmarks.coserve.unseen import CONTEXT_TOKENS, KV_ARGUMENTS
from benchmarks.testbed.bursts import trace_of
from benchmarks.testbed.calibration import TARGET_BUSY_SHARE
from benchmarks.testbed.gpu_hardware import GpuHardware, find_hardware
from benchmarks.testbed.hardware import Hardware, add_hardware_option
from benchmarks.testbed.origin import origin
from benchmarks.testbed.parts import Parts
from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.processes import Processes
from benchmarks.testbed.reporting import report
from benchmarks.testbed.run_directory import run_directory
from benchmarks.testbed.slot import ServingSlot, SlotPorts
from benchmarks.testbed.trace import Trace
from harvester.contracts.clock import MonotonicClock

PARTS = ("rounds", "reclaim", "closed_gate", "unseen", "failsafe")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.coserve", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--trace", type=Path, help="else bursts of the project's own generator")
    parser.add_argument("--seconds", type=float, help="measured, for each arm: 160, or 30 in short")
    parser.add_argument("--slice", type=float, help="of one arm in one round: 20 s, or 10 in short")
    parser.add_argument(
        "--arms", type=Arm, choices=tuple(Arm), nargs="+", default=tuple(Arm), help="of the rounds"
    )
    parser.add_argument(
        "--goals", action="store_const", const=ESSENTIAL, dest="arms", help="arms of the goals"
    )
    parser.add_argument(
        "--slo", type=float, nargs=2, metavar="MS", help="TTFT and ITL; else chosen beforehand"
    )
    parser.add_argument(
        "--busy",
        type=float,
        default=TARGET_BUSY_SHARE,
        metavar="RATIO",
        help="of the time, production alone: sets the replay's speed",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the rounds of earlier pieces"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after which no round begins, nor a part"
    )
    parser.add_argument(
        "--new-slot", action="store_true", help="begin the rounds before the slot has proven itself"
    )
    parser.add_argument("--failsafe", type=int, default=10, help="kills and stops of the agent")
    parser.add_argument(
        "--failsafe-file", type=Path, help="of their trials: those in it count, new ones are added"
    )
    parser.add_argument(
        "--failsafe-minutes", type=float, default=math.inf, help="after which no trial begins"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", default=PARTS, help="these parts of the run"
    )
    parser.add_argument(
        "--short", action="store_true", help="fewer trials and shorter slices, within ten minutes"
    )
    add_hardware_option(parser)
    given = parser.parse_args()
    # The machine that is asked for is found, and checked, in the run.
    report("coserve", lambda: measured(given), given.json, engines=False)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    hardware = find_hardware(given.hardware)
    hardware.check()
    trace = trace_of(given.trace, seed=given.seed)
    log = round_log(given, trace, hardware)
    if given.resume:
        log.resume()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = given.json.parent / f"{given.json.stem}.run"
    with (
        run_directory(out, cache=given.json.parent / "engine-cache") as paths,
        Processes(paths.logs) as processes,
    ):
        parts = Parts(processes=processes, paths=paths, clock=MonotonicClock())
        production, guest, agent, stock = free_ports(4)
        serves_stock = "rounds" in given.only and Arm.STOCK in log.settings.arms
        slot = ServingSlot(
            parts,
            SlotPorts(
                production=production,
                guest=guest,
                agent=agent,
                stock=stock if serves_stock else None,
            ),
            hardware=hardware,
            isolation=hardware.isolation(),
            concurrency=hardware.rollouts.concurrency,
            places=hardware.rollouts.places,
            production_context=CONTEXT_TOKENS,
            production_arguments=KV_ARGUMENTS,
            shipped_state=log.agent_state.absolute(),
        )
        return asyncio.run(Bench(slot, trace, given, log).run())


def round_log(given: argparse.Namespace, trace: Trace, hardware: Hardware) -> RoundLog:
    length = length_of(given)
    arms = arms_on(hardware, given.arms)
    settings = RunSettings(
        trace=trace.name,
        seed=given.seed,
        slice_s=length.slice_s,
        rounds=max(1, round(length.seconds / length.slice_s)),
        arms=arms,
        proven=length.proves and Arm.ROSEMUX in arms,
        slo_ms=None if given.slo is None else tuple(given.slo),
        busy_share=given.busy,
    )
    accelerator = hardware.gpu.uuid if isinstance(hardware, GpuHardware) else ""
    file = given.json.parent / f"{given.json.stem}.rounds.jsonl"
    return RoundLog(file, settings, origin(accelerator))


if __name__ == "__main__":
    main()
