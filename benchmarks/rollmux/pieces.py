"""Results of single arms on single seeds, kept in a directory between runs if one is given."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from harvester.contracts.clock import MonotonicClock
from scheduler.sim.rollmux.arms import ArmResult, run_arm, summary
from scheduler.sim.rollmux.workload import Drift, w1

_Kept = TypeVar("_Kept")


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    arm: ArmResult
    wall_s: float


class Pieces:
    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def arm(self, name: str, seed: int, *, drift: Drift, wide_ratio: float = 0.0) -> Piece:
        def run() -> Piece:
            clock = MonotonicClock()
            jobs = w1(seed, drift=drift, wide_ratio=wide_ratio)
            began_s = clock.now()
            result = summary(jobs, run_arm(name, jobs, seed=seed))
            return Piece(arm=result, wall_s=clock.now() - began_s)

        return self.kept(f"{name}-{seed}-{drift}-{wide_ratio:g}", run, Piece)

    def kept(self, name: str, run: Callable[[], _Kept], kind: type[_Kept]) -> _Kept:
        path = None if self._directory is None else self._directory / f"{name}.json"
        if path is not None and path.is_file():
            return msgspec.json.decode(path.read_bytes(), type=kind)
        result = run()
        if path is not None:
            path.write_bytes(msgspec.json.encode(result))
        return result

    def deterministic(self) -> bool:
        """Whether a small run writes the same events under three hash seeds."""
        program = (
            "import hashlib, msgspec\n"
            "from scheduler.sim.rollmux.arms import run_arm\n"
            "from scheduler.sim.rollmux.workload import w1\n"
            "run = run_arm('ours', w1(3, jobs=24), seed=3, record=True)\n"
            "print(hashlib.sha256(msgspec.json.encode(run.ledger.events)).hexdigest())"
        )
        digests = {
            subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                capture_output=True,
                check=True,
            ).stdout
            for hash_seed in ("0", "1", "4242")
        }
        return len(digests) == 1 and len(digests.pop().strip()) == hashlib.sha256().digest_size * 2
