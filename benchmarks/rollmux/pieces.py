"""Results of single arms on single seeds, kept in a directory between runs if one is given.

Arms do not know of each other, so they may be run ahead of being asked for, in several processes:
what each finds is the same as in one.
"""

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from time import process_time

import msgspec

from benchmarks.rollmux.arms import ARMS
from benchmarks.rollmux.mixes import Mix
from benchmarks.rollmux.variants import AS_PUBLISHED, VARIANTS
from benchmarks.testbed.kept_result import Result, kept_result
from harvester.platform.parent import end_with
from scheduler.sim.rollmux.arms import ArmResult, arm_result, run_arm
from scheduler.sim.rollmux.disruptions import UNDISTURBED, Disruptions
from scheduler.sim.rollmux.workload import JOBS, PAPER_WORLD, Drift, SimulatedJob, World


class ArmRun(msgspec.Struct, frozen=True, kw_only=True):
    arm: ArmResult
    cpu_s: float
    """Process time of the run, including its compilation, in s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOfSeed:
    """One arm on one seed of the workload."""

    name: str
    seed: int
    mix: Mix = Mix.W1
    drift: Drift = Drift.NONE
    mtbf_h: float = 0.0
    """Mean hours that a node is up before it fails; 0 for ever."""
    variant: str = AS_PUBLISHED
    jobs: int = JOBS

    @property
    def key(self) -> str:
        failing = f"-{self.mtbf_h:g}h" if self.mtbf_h else ""
        part = f"-of-{self.jobs}" if self.jobs != JOBS else ""
        world = f"-{self.variant}" if self.variant != AS_PUBLISHED else ""
        return f"{self.name}-{self.seed}-{self.mix}-{self.drift}{failing}{world}{part}"

    @property
    def world(self) -> World:
        return VARIANTS[self.variant].world

    def drawn(self) -> list[SimulatedJob]:
        jobs = self.mix.drawn(self.seed, drift=self.drift, jobs=self.jobs)
        return VARIANTS[self.variant].of(jobs, seed=self.seed)

    def run(self) -> ArmRun:
        disruptions = UNDISTURBED
        if self.mtbf_h:
            disruptions = Disruptions(seed=self.seed, node_mtbf_s=self.mtbf_h * 3600.0)
        return run_piece(
            self.name, self.drawn(), seed=self.seed, world=self.world, disruptions=disruptions
        )


def run_piece(
    name: str,
    jobs: list[SimulatedJob],
    *,
    seed: int,
    world: World = PAPER_WORLD,
    disruptions: Disruptions = UNDISTURBED,
) -> ArmRun:
    began_s = process_time()
    done = run_arm(ARMS[name], jobs, seed=seed, world=world, disruptions=disruptions)
    return ArmRun(arm=arm_result(jobs, done, world), cpu_s=process_time() - began_s)


class Pieces:
    def __init__(self, directory: Path | None, *, workers: int = 1) -> None:
        self._directory = directory
        self._workers = workers
        self._ahead: dict[str, ArmRun] = {}
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def run_ahead(self, chosen: Sequence[ArmOfSeed]) -> None:
        """Runs the missing ones ahead, `workers` at a time; a single worker runs none ahead."""
        missing = [one for one in chosen if not self._is_kept(one.key)]
        if self._workers == 1 or len(missing) < 2:
            return
        # Spawned, not forked: compiled code and its threads are not made to be forked.
        with ProcessPoolExecutor(
            self._workers,
            mp_context=get_context("spawn"),
            initializer=_as_worker,
            initargs=(os.getpid(),),
        ) as pool:
            try:
                running = {pool.submit(one.run): one for one in missing}
                for done in as_completed(running):
                    self._ahead[running[done].key] = done.result()
                    self.arm(running[done])
            except BaseException:
                # The pool would wait for every arm that is still to be run.
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in active_children():
                    worker.terminate()
                raise

    def arm(self, chosen: ArmOfSeed) -> ArmRun:
        return self.kept(chosen.key, lambda: self._ahead.get(chosen.key) or chosen.run(), ArmRun)

    def kept(self, name: str, run: Callable[[], Result], kind: type[Result]) -> Result:
        return kept_result(self._path(name), run, kind)

    def _path(self, name: str) -> Path | None:
        return None if self._directory is None else self._directory / f"{name}.json"

    def _is_kept(self, name: str) -> bool:
        path = self._path(name)
        return path is not None and path.is_file()


def _as_worker(parent: int) -> None:
    end_with(parent)
    # Ctrl-C reaches the whole group; the parent ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
