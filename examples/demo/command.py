"""`rosemux demo`: the command around a session, from its flags to its report and exit code."""

import asyncio
import json
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console

from benchmarks.testbed.bursts import trace_of
from benchmarks.testbed.excerpt import mean_rate
from benchmarks.testbed.prerequisites import check_machine
from benchmarks.testbed.processes import Processes
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.run_directory import run_directory
from benchmarks.testbed.serving_figures import arms_of
from benchmarks.testbed.slot import GUEST
from examples.demo.blocks import BlockPlan
from examples.demo.records import DemoArm, Record, TrainingStep
from examples.demo.report import write_report
from examples.demo.result import DemoFacts, as_json, level_of, result_of
from examples.demo.session import (
    Outcome,
    Recorder,
    Session,
    SessionPlan,
)
from examples.demo.stack import Stack
from examples.demo.table import closing, step_line
from harvester.contracts.clock import MonotonicClock

FULL = SessionPlan(
    blocks=BlockPlan(rounds=5, serving_s=28.0, steps=2),
    step_s=20.0,
    first_replay_s=10.0,
    last_replay_s=20.0,
    within_s=590.0,
)
QUICK = SessionPlan(
    blocks=BlockPlan(rounds=1, serving_s=20.0, steps=3),
    step_s=20.0,
    first_replay_s=8.0,
    last_replay_s=12.0,
    within_s=240.0,
)


def demo(
    trace: Path = typer.Option(None, help="Production trace: t_s,input_tokens,output_tokens."),
    quick: bool = typer.Option(False, help="One short round; for a first look and for CI."),
    out: Path = typer.Option(Path("out/demo"), help="Directory of result.json and report.html."),
    seed: int = typer.Option(1, help="Seed of tasks, sampling and the generated trace."),
) -> None:
    """Run production, a guest and an RL job on this machine and compare three arms."""
    clock = MonotonicClock()
    started_s = clock.now()
    console = Console()

    def on_progress(message: str) -> None:
        console.print(f"[dim]{clock.now() - started_s:5.0f} s[/dim]  {message}")

    check_machine()
    production = trace_of(trace, seed=seed)
    signal.signal(signal.SIGTERM, _interrupted)
    plan = QUICK if quick else FULL
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
                    progress=lambda record: _progress(record, on_progress),
                    clock=clock,
                    on_progress=on_progress,
                    seed=seed,
                    started_s=started_s,
                )
                outcome = asyncio.run(session.run())
        finally:
            recorder.close()
    facts = _facts(outcome, recorder.records, started_s=started_s, now=clock.now())
    result = result_of(recorder.records, facts)
    (out / "result.json").write_text(json.dumps(as_json(result), indent=1) + "\n")
    write_report(out / "report.html", result, recorder.records)
    console.print(closing(result))
    console.print(f"{out / 'result.json'}  {out / 'report.html'}")


def _progress(record: Record, on_progress: Callable[[str], None]) -> None:
    if isinstance(record, TrainingStep):
        on_progress(step_line(record, guests=frozenset({GUEST})))


def _facts(outcome: Outcome, records: list[Record], *, started_s: float, now: float) -> DemoFacts:
    excerpts, status = outcome.excerpts, outcome.gateway
    level = level_of(arms_of([r for r in records if isinstance(r, ProductionRequest)], DemoArm))
    first_s = outcome.first_harvested_token_s
    return DemoFacts(
        trace=excerpts[0].trace,
        scale=excerpts[0].speed,
        scaling={
            **asdict(outcome.sizes),
            "requests_per_s": mean_rate(excerpts),
            "prompts_per_step": outcome.prompts,
        },
        ttft_slo_s=level.ttft_s,
        itl_slo_s=level.itl_s,
        guests=frozenset({GUEST}),
        hash_mismatches=outcome.hash_mismatches,
        migrated=sum(job["turns"]["migrated"] for job in status["jobs"].values()),
        seconds_total=now - started_s,
        seconds_to_first_harvested_token=None if first_s is None else first_s - started_s,
    )


def _interrupted(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise KeyboardInterrupt
