"""The GPU benchmark's parts as they run on the day, on CPU tensors of tiny shapes.

Real processes, pages, gates and agents; only kernels and the driver are missing.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_slot.part_runs import PartRuns, Status
from benchmarks.gpu_slot.parts import PARTS
from harvester.contracts.clock import MonotonicClock

pytestmark = pytest.mark.timeout(400)


def _rehearsed(name: str, tmp_path: Path) -> dict[str, Any]:
    clock = MonotonicClock()
    runs = PartRuns(
        kind="cpu",
        tiny=True,
        path=tmp_path / "result.json",
        clock=clock,
        until_s=clock.now() + 350.0,
    )
    parts = [part for part in PARTS if part.name == name]
    found: dict[str, Any] = runs.run(parts, {})["parts"][name]
    assert found["status"] == Status.MEASURED, found.get("log")
    results: dict[str, Any] = found["results"]
    return results


def _check_arms(arms: dict[str, Any]) -> None:
    """Without a grant the guest does nothing, without a law it does something."""
    for name in ("alone", "alone_again"):
        assert arms[name]["guest"]["steps"] == 0
        assert set(arms[name]["guest"]["closed_by"]) == {"grant_closed"}
    assert arms["ungated"]["guest"]["tokens_per_s"] > 0
    for arm in arms.values():
        assert "failures" not in arm
        assert arm["production_ms"]["ttft"]["count"] > 0
        assert arm["over_alone"]["ttft"]["count"] > 0, "the same requests in every arm"


def test_time_slicing_measures_the_gate_and_the_shipped_agent(tmp_path: Path) -> None:
    found = _rehearsed("time_slicing", tmp_path)
    _check_arms(found["arms"])
    assert {"shipped", "epsilon_0.25", "epsilon_1", "rose_law"} < set(found["arms"])
    [granted] = found["arms"]["shipped"]["granted"]
    assert granted["mode"] == "open" or granted["reason"].startswith("proof slice")
    assert granted["epsilon"] == 0.05
    assert granted["phantom_prompt_tokens"] == 8
    closed = found["arms"]["shipped"]["guest"]["closed_by"]
    assert "pulse_fault" not in closed
    assert found["gate_ms"]["grant_to_step"]["count"] > 0
    assert found["arrivals"]["requests"] > 0
    assert found["blocking"]["forms"]


def test_a_share_of_mps_has_a_guest_of_its_own(tmp_path: Path) -> None:
    found = _rehearsed("mps", tmp_path)
    _check_arms(found["25_percent_below_normal"]["arms"])


def test_green_contexts_run_both_engines_in_one_process(tmp_path: Path) -> None:
    found = _rehearsed("green_contexts", tmp_path)
    _check_arms(found["guest_0.25"]["arms"])


def test_riders_are_measured_beside_each_batch(tmp_path: Path) -> None:
    found = _rehearsed("riders", tmp_path)
    assert [one["rows"] for one in found["batch_4"]["riders"]] == [4]
