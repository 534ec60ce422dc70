"""Results of single arms on single seeds, kept in a directory between runs if one is given."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from harvester.contracts.clock import MonotonicClock
from scheduler.sim.rollmux.arms import ArmResult, run_arm, summary
from scheduler.sim.rollmux.disruptions import UNDISTURBED, Disruptions
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

    def arm(
        self,
        name: str,
        seed: int,
        *,
        drift: Drift = Drift.NONE,
        wide_ratio: float = 0.0,
        mtbf_h: float = 0.0,
    ) -> Piece:
        """`mtbf_h`: mean hours that a node is up before it fails; 0 for ever."""

        def run() -> Piece:
            clock = MonotonicClock()
            jobs = w1(seed, drift=drift, wide_ratio=wide_ratio)
            disruptions = UNDISTURBED
            if mtbf_h:
                disruptions = Disruptions(seed=seed, node_mtbf_s=mtbf_h * 3600.0)
            began_s = clock.now()
            done = run_arm(name, jobs, seed=seed, disruptions=disruptions)
            return Piece(arm=summary(jobs, done), wall_s=clock.now() - began_s)

        failing = f"-{mtbf_h:g}h" if mtbf_h else ""
        return self.kept(f"{name}-{seed}-{drift}-{wide_ratio:g}{failing}", run, Piece)

    def kept(self, name: str, run: Callable[[], _Kept], kind: type[_Kept]) -> _Kept:
        path = None if self._directory is None else self._directory / f"{name}.json"
        if path is not None and path.is_file():
            return msgspec.json.decode(path.read_bytes(), type=kind)
        result = run()
        if path is not None:
            path.write_bytes(msgspec.json.encode(result))
        return result


def kept(results: Sequence[ArmResult], which: Literal["kept", "kept_profiled"] = "kept") -> float:
    """Share of all their jobs that kept their SLO."""
    return float(sum(getattr(one, which) for one in results) / job_count(results))


def job_count(results: Sequence[ArmResult]) -> int:
    return sum(one.jobs for one in results)
