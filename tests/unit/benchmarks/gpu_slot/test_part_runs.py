"""Parts in processes of their own: what becomes of the run when one of them fails."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu_slot.part_runs import PartRuns, Status
from benchmarks.gpu_slot.parts import BenchmarkPart
from harvester.contracts.clock import MonotonicClock

_BEHAVIOURS = {
    "works": "",
    "breaks": "raise RuntimeError('CUDA error: an illegal memory access was encountered')",
    "lacks": "raise Unsupported('no daemon here')",
    "dies": "os.kill(os.getpid(), signal.SIGKILL)",
    "hangs": """
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
    put('child', child.pid)
    with tempfile.TemporaryDirectory() as directory:
        put('directory', directory)
        time.sleep(600)""",
}
_MODULE = """
import os, signal, subprocess, sys, tempfile, time
from harvester.contracts.errors import Unsupported

def measured(kind, *, tiny, put):
    put("seen", [kind, tiny])
    {behaviour}
"""

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The parts of a run of these behaviours, as the file has them."""
    for name, behaviour in _BEHAVIOURS.items():
        (tmp_path / f"part_that_{name}.py").write_text(_MODULE.format(behaviour=behaviour))
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{tmp_path}")

    def run_of(*behaviours: str, limit_s: float = 60.0, time_s: float = 200.0) -> dict[str, Any]:
        clock, path = MonotonicClock(), tmp_path / "result.json"
        runs = PartRuns(kind="cpu", tiny=True, path=path, clock=clock, until_s=clock.now() + time_s)
        parts = [BenchmarkPart(name, f"part_that_{name}", limit_s) for name in behaviours]
        result = runs.run(parts, {"machine": "a test"})
        assert json.loads(path.read_text()) == result
        return result["parts"]

    return run_of


def test_a_part_that_fails_or_dies_ends_itself_alone(run: Run) -> None:
    found = run("breaks", "dies", "lacks", "works")
    assert {name: part["status"] for name, part in found.items()} == {
        "breaks": Status.FAILED,
        "dies": Status.FAILED,
        "lacks": Status.NOT_HERE,
        "works": Status.MEASURED,
    }
    # The results put before the failure are kept.
    assert all(part["results"] == {"seen": ["cpu", True]} for part in found.values())
    assert "illegal memory access" in found["breaks"]["log"]
    assert found["lacks"]["log"] == "no daemon here"


def test_a_part_that_hangs_is_ended_with_its_children_and_directories(run: Run) -> None:
    found = run("hangs", "works", limit_s=12.0)
    assert found["hangs"]["status"] == Status.AT_LIMIT
    assert found["works"]["status"] == Status.MEASURED
    assert not Path(found["hangs"]["results"]["directory"]).exists()
    child = found["hangs"]["results"]["child"]
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_no_part_begins_without_time_left(run: Run) -> None:
    assert run("works", time_s=5.0)["works"]["status"] == Status.NOT_RUN
