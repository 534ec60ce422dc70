"""A simulated workload's decisions, journalled as a control does: replayed, and explained."""

from pathlib import Path

import msgspec
import pytest

from scheduler.decision_log import DecisionLog
from scheduler.rollmux.cluster.runtime import PhaseRuntime
from scheduler.rollmux.cluster.runtime_events import RuntimeEffect, RuntimeEvent
from scheduler.rollmux.explain.explanation import EVER, explanation
from scheduler.rollmux.explain.history_entry import EventKind
from scheduler.sim.replay import replay_journal
from scheduler.sim.rollmux.arms import ARMS, runtime_of
from scheduler.sim.rollmux.disruptions import Disruptions
from scheduler.sim.rollmux.driver import Driver
from scheduler.sim.rollmux.workload import SimulatedJob, w1


class JournalledRuntime(PhaseRuntime):
    def __init__(self, like: PhaseRuntime, directory: Path) -> None:
        super().__init__(like.config)
        config = msgspec.to_builtins(self.config)
        self.log = DecisionLog(directory, self, config, max_bytes=1 << 30, now=0.0)

    def observe(self, event: RuntimeEvent, *, now: float) -> tuple[RuntimeEffect, ...]:
        effects = super().observe(event, now=now)
        self.log.decided(now=now, sample=event, effects=effects)
        return effects


@pytest.fixture(scope="module")
def jobs() -> list[SimulatedJob]:
    return w1(4, jobs=8)


@pytest.fixture(scope="module")
def directory(jobs: list[SimulatedJob], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("journal")
    runtime = JournalledRuntime(runtime_of(ARMS["ours"], jobs, seed=4), directory)
    Driver(jobs, runtime, disruptions=Disruptions(seed=4, node_mtbf_s=30 * 3600.0)).run()
    runtime.log.close()
    return directory


def test_moves_savings_and_failures_of_a_whole_workload_replay(directory: Path) -> None:
    replayed = replay_journal(directory / f"{PhaseRuntime.NAME}.jsonl")
    assert replayed.difference is None
    assert replayed.decisions > 1000


def test_every_move_of_a_workload_names_its_saving_or_the_rescued_job(
    directory: Path, jobs: list[SimulatedJob]
) -> None:
    names = {one.job.job for one in jobs}
    stories = [explanation(directory, job, since=EVER, permits=False) for job in sorted(names)]
    entries = [entry for story in stories for entry in story.entries]
    moves = [entry.text for entry in entries if entry.kind is EventKind.MOVE_REQUESTED]
    assert moves
    for text in moves:
        rescued = any(f"the promise to {job} was at risk" in text for job in names)
        assert rescued or "saves" in text or "failed" in text, text
    assert any(entry.kind is EventKind.RESTARTED for entry in entries)
    for story in stories:
        assert story.entries[0].kind is EventKind.SUBMITTED
        assert story.entries[-1].kind is EventKind.CLOSED
        assert {one.kind for one in story.permits} >= {"rollout", "training"}
