"""The RollMux benchmark's figures of an arm: both readings of an SLO, and the reference prices."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.rollmux import __main__ as benchmark
from benchmarks.rollmux.arm_figures import arm_figures, chosen_arms, dollars_over
from benchmarks.rollmux.mixes import Mix
from benchmarks.rollmux.pieces import ArmOfSeed, ArmRun, Pieces
from scheduler.sim.rollmux.arms import WINDOW_GOAL, ArmResult, arm_result
from scheduler.sim.rollmux.ledger import Ledger, RunCounts, RunResult
from scheduler.sim.rollmux.workload import PAPER_WORLD, SimulatedJob, w1


def _piece(dollars: float, *, kept: int = 10, windows_kept: int = 8, above: int = 1) -> ArmRun:
    return ArmRun(
        arm=ArmResult(
            dollars=dollars,
            jobs=10,
            kept=kept,
            kept_profiled=10,
            kept_falsely=0,
            worst_window=1.4,
            windows_kept=windows_kept,
            windows_above_goal=above,
            moves=20,
            events=1000,
        ),
        cpu_s=dollars / 10,
    )


def test_an_arm_is_reported_seed_by_seed_and_promise_by_promise() -> None:
    found = arm_figures([_piece(100.0), _piece(200.0, kept=9, above=0)], [180.0, 340.0])
    assert found["dollars"] == [100.0, 200.0]
    assert found["solo_d_over_it"]["by_seed"] == [1.8, 1.7]
    assert found["solo_d_over_it"]["min"] == 1.7
    assert found["slo_of_life"]["ratio"] == 19 / 20
    worst = found["slo_of_worst_20_iterations"]
    assert (worst["ratio"], worst["jobs_above_goal"], worst["goal_over_slo"]) == (0.8, 1, 1.3)
    assert found["cpu_s"]["by_seed"] == [10.0, 20.0]
    assert found["moves_per_job"] == 2.0


def test_dollars_are_compared_seed_by_seed() -> None:
    arms = {"ours": {"dollars": [100.0, 200.0]}, "other": {"dollars": [150.0, 200.0]}}
    assert dollars_over("ours", arms)["other"]["by_seed"] == [1.5, 1.0]
    assert dollars_over("ours", arms)["other"]["mean"] == 1.25


def _ended(jobs: list[SimulatedJob], stretched: list[float]) -> RunResult:
    """Every job's first half takes as long as alone, its second so much longer."""
    ledger = Ledger()
    for one, factor in zip(jobs, stretched, strict=True):
        now, ends_s = one.arrival_s + PAPER_WORLD.cold_start_s, []
        for at, solo_s in enumerate(one.iterations_s(PAPER_WORLD).tolist()):
            now += solo_s * (factor if at >= one.iterations / 2 else 1.0)
            ends_s.append(now)
        ledger.iteration_ends_s[one.job.job], ledger.ended_s[one.job.job] = ends_s, now
    return RunResult(ledger=ledger, counts=RunCounts(), end_s=now)


def test_a_promise_of_a_life_may_be_kept_where_its_worst_iterations_are_not() -> None:
    jobs = [one for one in w1(0, jobs=60) if one.job.slo > 1.7 and one.iterations > 100]
    factors = [0.9, 1.2, 1.4, *[0.99] * (len(jobs) - 3)]
    stretched = [one.job.slo * by for one, by in zip(jobs, factors, strict=True)]
    found = arm_result(jobs, _ended(jobs, stretched))
    assert found.kept == len(jobs)
    assert found.windows_kept == len(jobs) - 2
    assert found.windows_above_goal == 1
    assert found.worst_window == pytest.approx(1.4)
    assert found.worst_window > WINDOW_GOAL


def test_arms_are_chosen_by_name_shared_or_not(tmp_path: Path) -> None:
    wanted = {
        name: [ArmOfSeed(name=name, seed=seed, mix=Mix.W3, jobs=3) for seed in (0, 1)]
        for name in ("greedy", "verl", "solo_d")
    }
    found = chosen_arms(wanted, Pieces(tmp_path))
    assert list(found) == ["greedy", "verl", "solo_d"]
    assert found["solo_d"]["solo_d_over_it"]["by_seed"] == [1.0, 1.0]
    assert found["verl"]["solo_d_over_it"]["mean"] > 1.0
    assert len(found["greedy"]["cpu_s"]["by_seed"]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {
        "greedy-0-w3-none-of-3.json",
        "greedy-1-w3-none-of-3.json",
    }


def test_one_arm_runs_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    given = ["--arm", "ours", "--arm", "solo_d", "--seeds", "1", "--jobs", "3", "--workers", "1"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.rollmux", "--json", str(out), *given])
    benchmark.main()
    kept = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == kept
    assert list(kept["arms"]) == ["ours", "solo_d"]
    ours = kept["arms"]["ours"]
    assert ours["jobs"] == 3
    assert ours["slo_counts_queueing"] is True
    assert ours["cpu_s"]["mean"] > 0.0
    assert (
        ours["solo_d_over_it"]["mean"] == kept["arms"]["solo_d"]["dollars"][0] / ours["dollars"][0]
    )
