"""`rosemux demo`: the command around a session, from its flags to its report and exit code."""

import asyncio
import signal
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console

from harvester.contracts.clock import MonotonicClock
from scheduler.demo.blocks import BlockPlan
from scheduler.demo.bursts import Bursts, generated_trace
from scheduler.demo.prerequisites import check_machine
from scheduler.demo.processes import Processes
from scheduler.demo.run_directory import run_directory
from scheduler.demo.session import Outcome, Recorder, Session, SessionPlan
from scheduler.demo.stack import Stack
from scheduler.demo.trace import Trace, read_trace

FULL = SessionPlan(blocks=BlockPlan(rounds=3, serving_s=40.0, steps=8), calibration_s=20.0)
QUICK = SessionPlan(blocks=BlockPlan(rounds=1, serving_s=20.0, steps=4), calibration_s=12.0)
_GENERATED_S = 3600.0


def demo(
    trace: Path = typer.Option(None, help="Production trace: t_s,input_tokens,output_tokens."),
    quick: bool = typer.Option(False, help="One short round; for a first look and for CI."),
    out: Path = typer.Option(Path("out/demo"), help="Where result.json and report.html go."),
    seed: int = typer.Option(1, help="Of tasks, sampling and the generated trace."),
) -> None:
    """Run production, a guest and an RL job on this machine and compare three arms."""
    clock = MonotonicClock()
    started_s = clock.now()
    console = Console()

    def told(message: str) -> None:
        console.print(f"[dim]{clock.now() - started_s:5.0f} s[/dim]  {message}")

    check_machine()
    production = _trace(trace, seed)
    signal.signal(signal.SIGTERM, _interrupted)
    plan = QUICK if quick else FULL
    recorder: Recorder
    with run_directory(out, cache=out.parent / "cache") as paths:
        recorder = Recorder(out / "records.jsonl")
        try:
            with Processes(paths.logs) as processes:
                stack = Stack(processes, paths, seed=seed)
                session = Session(
                    stack=stack,
                    trace=production,
                    plan=plan,
                    recorder=recorder,
                    clock=clock,
                    told=told,
                    seed=seed,
                )
                outcome = asyncio.run(session.run())
        finally:
            recorder.close()
    _report(outcome, recorder, out)


def _trace(path: Path | None, seed: int) -> Trace:
    if path is None:
        return generated_trace(Bursts(), duration_s=_GENERATED_S, seed=seed)
    return read_trace(path)


def _report(outcome: Outcome, recorder: Recorder, out: Path) -> None:
    print(outcome, len(recorder.records), out)


def _interrupted(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise KeyboardInterrupt
