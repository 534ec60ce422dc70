"""A short run ends within its time, whatever is asked for; a full one never looks at the clock."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.coserve import __main__ as coserve
from benchmarks.coserve.arms import Arm
from benchmarks.coserve.rounds import Runner
from benchmarks.coserve.run_length import SHORT
from harvester.contracts.page import PageDirectory
from scheduler.demo.bursts import Bursts, generated_trace
from scheduler.demo.hardware import CpuHardware
from scheduler.demo.slot import ServingSlot
from scheduler.demo.window import Window

ARM_S = 12.0


@dataclass
class CountedRunner:
    """Each arm takes twelve seconds of the clock that everybody looks at."""

    now_s: float = 0.0
    done: list[tuple[Arm, int]] = field(default_factory=list)
    slices: list[Any] = field(default_factory=list)

    def now(self) -> float:
        return self.now_s

    async def run(self, arm: Arm, turn: int, window: Window) -> Any:
        assert window.arrivals
        self.now_s += ARM_S
        self.done.append((arm, turn))
        return SimpleNamespace(
            seconds=10.0, production_busy_s=5.0, production_core_s=5.0, guest_tokens=100
        )


def rounds_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, started_s: float, arguments: Sequence[str]
) -> CountedRunner:
    runner = CountedRunner()
    monkeypatch.setattr(coserve, "figures", lambda *_: {})
    slot = SimpleNamespace(hardware=CpuHardware(), pages=PageDirectory.create(folder / "slot"))
    trace = generated_trace(Bursts(), duration_s=3600.0, seed=1)
    given = argparse.Namespace(
        short="--short" in arguments, seconds=120.0, failsafe=0, failsafe_file=None, seed=1
    )
    bench = coserve.Bench(cast(ServingSlot, slot), trace, given)
    bench.clock, bench.started_s = cast(Any, runner), 0.0
    runner.now_s = started_s
    windows = bench.load.windows(bench.length.slice_s, count=bench.rounds)
    asyncio.run(bench._rounds(cast(Runner, runner), windows))
    return runner


def test_a_short_run_leaves_out_the_rounds_that_would_end_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = rounds_run(tmp_path, monkeypatch, started_s=220.0, arguments=["--short"])
    assert runner.now_s <= SHORT.within_s
    rounds = {turn for _, turn in runner.done}
    assert rounds == {0, 1, 2}
    assert len(runner.done) == len(rounds) * len(Arm), "whole rounds only"
    assert "round 4 is left out" in capsys.readouterr().err


def test_the_first_round_is_run_however_late_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = rounds_run(tmp_path, monkeypatch, started_s=530.0, arguments=["--short"])
    assert {turn for _, turn in runner.done} == {0}


def test_what_was_measured_outlives_a_part_that_fails(tmp_path: Path) -> None:
    parts = SimpleNamespace(paths=SimpleNamespace(logs=tmp_path / "x.run" / "logs"))
    parts.paths.logs.mkdir(parents=True)
    pages = PageDirectory.create(tmp_path / "slot")
    slot = SimpleNamespace(hardware=CpuHardware(), pages=pages, parts=parts)
    given = argparse.Namespace(short=True, seconds=None, failsafe=0, failsafe_file=None, seed=1)
    trace = generated_trace(Bursts(), duration_s=60.0, seed=1)
    bench = coserve.Bench(cast(ServingSlot, slot), trace, given)
    bench._keep({"hardware": "cpu", "slo": {"ttft_ms": 1.0}})
    kept = json.loads((tmp_path / "x.run" / "parts.json").read_text())
    assert kept["slo"] == {"ttft_ms": 1.0}


def test_a_full_run_runs_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = rounds_run(tmp_path, monkeypatch, started_s=9_000.0, arguments=[])
    assert {turn for _, turn in runner.done} == set(range(6))
