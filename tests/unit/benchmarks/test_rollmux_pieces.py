"""The RollMux benchmark's pieces: the same in several processes, and kept between runs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.rollmux.pieces import ArmOfSeed, Pieces

WANTED = [ArmOfSeed(name=name, seed=3, jobs=3) for name in ("ours", "greedy")]

DRIVER = """
import signal
from benchmarks.rollmux.pieces import ArmOfSeed, Pieces

if __name__ == "__main__":
    # A shell's background starts everything with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    long = [ArmOfSeed(name="ours", seed=seed) for seed in range(6)]
    print("started", flush=True)
    Pieces(None, workers=2).run_ahead(long)
"""
ROOT = Path(__file__).parents[3]
WAIT_S = 60.0


def test_arms_that_ran_side_by_side_found_what_they_find_one_after_another(tmp_path: Path) -> None:
    together, alone = Pieces(tmp_path, workers=2), Pieces(None)
    together.run_ahead(WANTED)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "greedy-3-w1-none-of-3.json",
        "ours-3-w1-none-of-3.json",
    ]
    assert [together.arm(one).arm for one in WANTED] == [alone.arm(one).arm for one in WANTED]


def test_a_kept_result_is_not_run_again(tmp_path: Path) -> None:
    first = Pieces(tmp_path).arm(WANTED[1])
    again = Pieces(tmp_path, workers=2)
    again.run_ahead(WANTED[1:])
    assert again.arm(WANTED[1]) == first


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_run_that_started_them(tmp_path: Path, number: signal.Signals) -> None:
    program = tmp_path / "driver.py"
    program.write_text(DRIVER)
    with subprocess.Popen(
        [sys.executable, program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        children: list[psutil.Process] = []
        while len(children) < 3 and driver.poll() is None:
            children = psutil.Process(driver.pid).children()
        driver.send_signal(number)
        assert driver.wait(timeout=WAIT_S) == -number
        _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert not alive
