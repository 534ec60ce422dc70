"""Tables for the README: one row per arm, with its SLOs in both readings and their meaning."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.rollmux import tables as module
from benchmarks.rollmux.arm_figures import arm_figures, unshared_figures
from benchmarks.rollmux.pieces import ArmRun
from benchmarks.rollmux.tables import arms_table, tables
from scheduler.sim.rollmux.arms import ArmResult
from scheduler.sim.rollmux.baselines import Unshared


def _arms() -> dict[str, dict[str, object]]:
    def piece(dollars: float, kept: int) -> ArmRun:
        arm = ArmResult(
            dollars=dollars,
            jobs=200,
            kept=kept,
            kept_profiled=200,
            kept_falsely=0,
            worst_window=1.25,
            windows_kept=150,
            windows_above_goal=3,
            moves=800,
            events=1,
        )
        return ArmRun(arm=arm, cpu_s=20.0)

    alone = [200.0, 220.0]
    return {
        "ours": arm_figures([piece(100.0, 200), piece(110.0, 200)], alone),
        "rollmux_paper": arm_figures([piece(120.0, 190), piece(154.0, 195)], alone),
        "solo_d": unshared_figures(
            [Unshared(dollars=one, attained=200) for one in alone], alone, jobs=400
        ),
    }


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_arm_has_a_row_of_as_many_cells_as_the_head() -> None:
    text = arms_table(_arms(), measure="ours")
    head, _, *rows = [_cells(line) for line in text.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows] == ["ours", "rollmux_paper", "solo_d"]
    assert {len(row) for row in rows} == {len(head)}
    paper = dict(zip(head, rows[1], strict=True))
    assert paper["dollars over ours"] == "1.300 (1.20 to 1.40)"
    assert paper["SLOs kept, life"] == "385 of 400"
    assert paper["worst 20 iterations"] == "300 of 400"
    assert paper["jobs above 1.3"] == "6"
    assert text.endswith("2 seeds; an SLO counts queueing.")


def test_without_a_measure_no_dollars_are_compared() -> None:
    head = _cells(arms_table(_arms(), measure=None).splitlines()[0])
    assert not any(name.startswith("dollars over") for name in head)


def test_the_parts_of_a_result_are_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = _arms()
    result = {
        "quality": {"arms": arms},
        "drift": {"mixed": {"arms": {"ours": arms["ours"], "hourly": arms["rollmux_paper"]}}},
        "worlds": {"sync": arms["ours"]},
        "arms": arms,
    }
    found = dict(tables(result))
    assert [*found] == ["quality", "drift, mixed", "worlds", "arms"]
    # The table of --arm reads as those of the mixes do.
    assert found["arms"] == found["quality"]
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", ["tables", str(path)])
    module.main()
    assert "### worlds" in capsys.readouterr().out
