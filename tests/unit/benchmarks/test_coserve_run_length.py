"""A short run ends within its time for any wish; a full one never looks at the clock."""

import argparse
import asyncio
import json
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.coserve.__main__ import round_log
from benchmarks.coserve.arms import Arm, Setting
from benchmarks.coserve.bench import Bench
from benchmarks.coserve.failsafe import FailSafe
from benchmarks.coserve.figures import Facts
from benchmarks.coserve.round_log import Plan
from benchmarks.coserve.rounds import ArmSlice, Runner
from benchmarks.coserve.run_length import PROVING_SLICE_S, SHORT
from benchmarks.testbed.bursts import Bursts, generated_trace
from benchmarks.testbed.excerpt import Excerpt
from benchmarks.testbed.hardware import CpuHardware
from benchmarks.testbed.slo import FIRST_LEVEL, ServiceLevel
from benchmarks.testbed.slot import ServingSlot
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import PageDirectory

ARM_S = 10.0


@dataclass
class CountedRunner:
    """Each arm takes ten seconds of the shared clock."""

    now_s: float = 0.0
    done: list[tuple[Arm, int]] = field(default_factory=list)
    level: ServiceLevel = FIRST_LEVEL
    folder: Path | None = None
    kept_at_starts: list[int | None] = field(default_factory=list)
    """Rounds in the file when each round began."""
    shipped: bool = True
    """Whether the agent in force is the shipped one."""

    def now(self) -> float:
        return self.now_s

    async def run(self, arm: Arm, turn: int, excerpt: Excerpt) -> Any:
        assert excerpt.arrivals
        if self.folder is not None and (not self.done or self.done[-1][1] != turn):
            there = (self.folder / "x.run" / "parts.json").exists()
            self.kept_at_starts.append(kept_in(self.folder)["rounds"] if there else None)
        self.now_s += ARM_S
        self.done.append((arm, turn))
        return ArmSlice(
            arm=arm,
            round=turn,
            seconds=10.0,
            guest_tokens=100,
            guest_steps=10,
            production_busy_s=5.0,
            production_core_s=5.0,
            idle_s=4.0,
            guest_core_s=3.0,
            step_work_s=1e-4,
        )

    async def instruct(self, setting: Setting) -> None:
        self.shipped = setting.shipped


def bench_in(
    folder: Path,
    runner: CountedRunner,
    arguments: Sequence[str],
    *,
    resumes: bool = False,
    **given: Any,
) -> Bench:
    """Its clock is the runner's and counts from the run's start."""
    paths = SimpleNamespace(logs=folder / "x.run" / "logs")
    slot = SimpleNamespace(
        hardware=CpuHardware(),
        pages=PageDirectory.create(folder / "slot"),
        parts=SimpleNamespace(paths=paths),
    )
    trace = generated_trace(Bursts(), duration_s=3600.0, seed=1)
    asked: dict[str, Any] = {
        "json": folder / "x.json",
        "seconds": 120.0,
        "slice": None,
        "arms": tuple(Arm),
        "slo": None,
        "busy": 0.5,
        "minutes": math.inf,
        "failsafe": 0,
        "failsafe_file": None,
        "seed": 1,
        "new_slot": True,
    }
    namespace = argparse.Namespace(short="--short" in arguments, **(asked | given))
    log = round_log(namespace, trace, slot.hardware)
    if resumes:
        log.resume()
    bench = Bench(cast(ServingSlot, slot), trace, namespace, log)
    bench.clock, bench.started_s = cast(Any, runner), 0.0
    return bench


def kept_in(folder: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((folder / "x.run" / "parts.json").read_text())
    return kept


def made_figures(_: object, slices: Sequence[ArmSlice], facts: Facts) -> dict[str, Any]:
    return {"rate": facts.requests_per_s, "rounds": len({each.round for each in slices})}


def rounds_run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    started_s: float,
    arguments: Sequence[str],
    **given: Any,
) -> CountedRunner:
    runner = CountedRunner(now_s=started_s, folder=folder)
    monkeypatch.setattr("benchmarks.coserve.bench.figures", made_figures)
    bench = bench_in(folder, runner, arguments, **given)
    excerpts = bench.load.excerpts(bench.length.slice_s, count=bench.rounds)
    found = asyncio.run(bench._rounds(cast(Runner, runner), excerpts))
    assert found["rate"] > 0.0
    assert not runner.shipped, "other parts have rules of their own"
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


def test_each_round_is_kept_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = rounds_run(tmp_path, monkeypatch, started_s=220.0, arguments=["--short"])
    assert runner.kept_at_starts == [None, 1, 2]
    assert kept_in(tmp_path)["rounds"] == 3


class ProvingAgent:
    """An agent whose slot counts the half of each slice."""

    def __init__(self, runner: CountedRunner, *, proving_s: float) -> None:
        self.runner, self.proving_s = runner, proving_s

    async def offers(self) -> SimpleNamespace:
        left_s = max(0.0, self.proving_s - 0.5 * PROVING_SLICE_S * len(self.runner.done))
        return SimpleNamespace(slots=(SimpleNamespace(proving_left_s=left_s, reason="r"),))


def proving_bench(folder: Path, *, proving_s: float, **given: Any) -> tuple[Bench, CountedRunner]:
    runner = CountedRunner()
    bench = bench_in(folder, runner, (), new_slot=False, **given)
    agent = ProvingAgent(runner, proving_s=proving_s)
    bench.lease = cast(Any, SimpleNamespace(agent=agent))
    return bench, runner


def test_rosemux_alone_runs_until_the_slot_has_proven_itself(tmp_path: Path) -> None:
    bench, runner = proving_bench(tmp_path, proving_s=3 * PROVING_SLICE_S)
    assert bench.log.settings.proven
    assert asyncio.run(bench._proves(cast(Runner, runner)))
    assert runner.shipped
    assert runner.done == [(Arm.ROSEMUX, number) for number in range(6)]
    assert len(bench.log.proving) == 6


def test_a_proof_without_an_end_is_an_error_and_one_that_is_too_late_ends_the_piece(
    tmp_path: Path,
) -> None:
    bench, runner = proving_bench(tmp_path, proving_s=1e6)
    with pytest.raises(ConfigError, match="lacks"):
        asyncio.run(bench._proves(cast(Runner, runner)))
    late, runner = proving_bench(tmp_path, proving_s=1e6, minutes=1.0)
    assert not asyncio.run(late._proves(cast(Runner, runner)))
    assert not late.log.proving


@pytest.mark.parametrize("measured", [1, 2])
def test_a_piece_that_ends_within_the_proof_keeps_the_rounds_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: int
) -> None:
    """A slot that its proof has stopped proves itself anew; no round is left for it in the end."""
    monkeypatch.setattr("benchmarks.coserve.bench.figures", made_figures)
    bench, runner = proving_bench(tmp_path, proving_s=1e6, seconds=40.0, minutes=1.0)
    excerpts = bench.load.excerpts(bench.length.slice_s, count=bench.rounds)
    bench.log.begin(Plan(sizes=bench.load.sizes, rate=bench.load.rate, level=FIRST_LEVEL))
    for turn in range(measured):
        bench.log.add([asyncio.run(runner.run(Arm.ROSEMUX, turn, excerpts[turn]))], [])
    found = asyncio.run(bench._rounds(cast(Runner, runner), excerpts))
    assert (found["rounds"], len(bench.log.rounds), bench.log.proving) == (measured, measured, [])
    assert not runner.shipped, "other parts have rules of their own"


class CountedTrials:
    """Trials of `trial_s` seconds each."""

    def __init__(self, clock: CountedRunner, trial_s: float) -> None:
        self.clock, self.trial_s = clock, trial_s

    async def trial(self, number: signal.Signals) -> float:
        assert number in (signal.SIGKILL, signal.SIGSTOP)
        self.clock.now_s += self.trial_s
        return 500.0


def failsafe_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, started_s: float, arguments: Sequence[str]
) -> tuple[CountedRunner, dict[str, Any]]:
    """All of a run behind its other parts."""
    runner = CountedRunner(now_s=started_s)
    trials = CountedTrials(runner, 0.9 * SHORT.trial_s)
    monkeypatch.setattr(FailSafe, "_trial", trials.trial)
    bench = bench_in(
        folder, runner, arguments, failsafe=10, failsafe_minutes=math.inf, only=["failsafe"]
    )
    bench.lease = bench.rollouts = cast(Any, None)
    found = asyncio.run(bench._failsafe())
    return runner, found.get("failsafe_ms", {})


def test_trials_of_the_fail_safe_end_with_the_time_of_a_short_run_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, found = failsafe_run(tmp_path, monkeypatch, started_s=400.0, arguments=["--short"])
    assert 400.0 < runner.now_s <= SHORT.within_s
    assert 2 <= sum(found["n"].values()) < 20
    assert kept_in(tmp_path)["failsafe_ms"] == found


def test_a_fail_safe_without_time_for_one_trial_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late_s = SHORT.within_s - SHORT.trial_s + 1.0
    runner, found = failsafe_run(tmp_path, monkeypatch, started_s=late_s, arguments=["--short"])
    assert (runner.now_s, found) == (late_s, {})
    assert "failsafe is left out" in capsys.readouterr().err


def test_a_full_run_makes_every_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = failsafe_run(tmp_path, monkeypatch, started_s=9_000.0, arguments=[])
    assert found["n"] == {"SIGKILL": 10, "SIGSTOP": 10}


def test_a_full_run_runs_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = rounds_run(tmp_path, monkeypatch, started_s=9_000.0, arguments=[])
    assert {turn for _, turn in runner.done} == set(range(6))


def test_a_run_in_pieces_measures_each_round_once_in_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rounds_run(tmp_path, monkeypatch, started_s=0.0, arguments=[])
    (tmp_path / "x.rounds.jsonl").unlink()
    pieces: list[tuple[Arm, int]] = []
    for _ in range(3):
        minutes = 2 * len(Arm) * ARM_S / 60.0
        piece = rounds_run(
            tmp_path, monkeypatch, started_s=0.0, arguments=[], minutes=minutes, resumes=True
        )
        assert piece.now_s <= 60.0 * minutes
        pieces += piece.done
    assert pieces == whole.done
    assert kept_in(tmp_path)["rounds"] == 6
