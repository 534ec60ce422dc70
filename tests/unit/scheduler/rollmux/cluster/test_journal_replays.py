"""Every file of a planning control's journal, decided again by `rosemux replay`'s own function."""

import errno
import tempfile
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.ids import JobId
from harvester.contracts.journal import Decided, JournalWriter, Opened, read_journal
from scheduler.rollmux.beliefs.durations import Belief
from scheduler.rollmux.cluster.runtime import PhaseRuntime
from scheduler.rollmux.control.control_state import ControlState
from scheduler.rollmux.explain.explanation import EVER, explanation
from scheduler.rollmux.permits.events import (
    Beat,
    Enter,
    PermitEndReason,
)
from scheduler.sim.replay import replay_journal
from tests.unit.scheduler.rollmux.cluster.submissions import ROLLOUT, Control, cluster, submission
from tests.unit.scheduler.rollmux.cluster.test_shell_invariants import JOBS, World

NAME = "scheduler.policy.cluster.jsonl"


class JournalledWorld(World):
    """The same jobs with moving tails, under queries of status and metrics."""

    steps = "seeellbbfntpppqqhwwwwwwR"

    def step(self) -> None:
        super().step()
        service = self.control.service
        match self.chance.choice("psmc..."):
            case "p":
                self.progresses(self.chance.choice(JOBS))
            case "s":
                service.statuses()
            case "m":
                service.metrics()
            case "c":
                self.control.clock.now_s += self.chance.choice((70.0, 1900.0))
                service.tick()
            case _:
                pass

    def progresses(self, name: str) -> None:
        """Advances a rollout that others may wait for, and its narrowed tail."""
        permit = self.control.service.policy.permit(JobId(name))
        if permit is None or permit.kind is not ROLLOUT or not permit.holding:
            return
        for ratio in (0.3, 0.6, 0.9, 0.95):
            self.control.clock.now_s += 1.0
            beat = Beat(job=JobId(name), epoch=permit.epoch, complete_ratio=ratio)
            self.control.service.call(beat)
        self.control.service.call(Beat(job=JobId(name), epoch=permit.epoch, narrowed=True))


def _tells_every_story(directory: Path) -> None:
    for job in JOBS:
        try:
            found = explanation(directory, job, since=EVER, permits=True)
        except ConfigError:
            # The journal goes back only so far.
            continue
        assert all(wait_s >= 0.0 for one in found.permits for wait_s in one.waits_s)


class Archive:
    """Every file that the journal ever was, replayed once it is full, and the last as it is."""

    def __init__(self, directory: Path) -> None:
        self._old, self._current = directory / f"{NAME}.1", directory / NAME
        self._seen: tuple[int, int] | None = None
        self.decisions = self.files = 0

    def look(self) -> None:
        if not self._old.exists():
            return
        found = self._old.stat()
        if self._seen != (found.st_ino, found.st_mtime_ns):
            self._seen = found.st_ino, found.st_mtime_ns
            self._replay(self._old)

    def end(self) -> None:
        self.look()
        self._replay(self._current)

    def _replay(self, path: Path) -> None:
        replayed = replay_journal(path)
        assert replayed.difference is None, replayed.difference
        self.decisions += replayed.decisions
        self.files += 1


@settings(max_examples=10, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(40, 150),
    st.sampled_from((20_000, 60_000, 10_000_000)),
)
def test_whatever_jobs_nodes_time_and_restarts_do_every_file_replays(
    chance: Random, steps: int, journal_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        state = directory / "state.sqlite"
        world = JournalledWorld(chance, state, journal=directory, journal_bytes=journal_bytes)
        archive = Archive(directory)
        for _ in range(steps):
            world.step()
            world.check()
            archive.look()
        world.drained()
        world.control.service.close()
        archive.end()
        # How much a step decides is chance; that it is looked at at all is not.
        assert archive.decisions > 0
        _tells_every_story(directory)


def test_reading_metrics_after_a_restart_changes_no_belief(tmp_path: Path) -> None:
    control = Control(state=tmp_path / "state.sqlite", journal=tmp_path)
    control.submit(submission("a"))
    for _ in range(5):
        control.iteration("a", 40.0)
    control = control.restarted()
    control.service.metrics()
    control.phase("a", ROLLOUT, 40.4)
    _believes_what_is_replayed(control, tmp_path)


def test_reading_metrics_after_an_overrun_changes_no_belief(tmp_path: Path) -> None:
    control = Control(state=tmp_path / "state.sqlite", journal=tmp_path)
    control.submit(submission("a", slo=3.0), submission("b", slo=3.0))
    for job in "aaaaab":
        control.iteration(job)
        control.pass_time(1.0)
    control.runs("a")
    for _ in range(40):
        control.enter("b")
        control.pass_time(4.0, beats="a")
    permit = control.service.policy.permit(JobId("a"))
    assert permit is not None
    assert permit.ended is PermitEndReason.OVERRAN
    control.service.metrics()
    control.leave("b")
    control.pass_time(1.0)
    control.phase("a", ROLLOUT, control.service.cluster.planner.facts[JobId("a")].rollout.mean_s)
    _believes_what_is_replayed(control, tmp_path)


def _believes_what_is_replayed(control: Control, directory: Path) -> None:
    beliefs = {job: facts.belief() for job, facts in control.service.cluster.planner.facts.items()}
    control.service.close()
    archive = Archive(directory)
    archive.end()
    assert archive.decisions > 20
    assert beliefs == _replayed_beliefs(directory / NAME)


def test_the_belief_in_force_outlives_a_restart(tmp_path: Path) -> None:
    control = Control(state=tmp_path / "state.sqlite")
    control.submit(submission("a"))
    for at in range(9):
        control.iteration("a", 40.0 + 0.01 * at)
    before = control.service.cluster.planner.facts[JobId("a")].belief()
    control = control.restarted()
    assert control.service.cluster.planner.facts[JobId("a")].belief() == before
    control.service.close()


def test_metrics_go_on_counting_when_the_journal_begins_a_new_file(tmp_path: Path) -> None:
    control = Control(journal=tmp_path, journal_bytes=20_000)
    control.submit(*(submission(name, slo=3.0) for name in "abc"))
    assert b'plan_decisions_total{decision="placed"} 3.0' in control.service.metrics()
    for _ in range(4):
        control.iteration("a")
    assert (tmp_path / f"{NAME}.1").exists()
    control.submit(submission("d", slo=3.0))
    assert b'plan_decisions_total{decision="placed"} 4.0' in control.service.metrics()
    control.service.close()


def test_the_journal_s_next_file_has_the_last_beats_and_review(
    tmp_path: Path,
) -> None:
    """A file that fills up with every decision would else put off every review for ever."""
    control = Control(cluster(gone_s=30.0, review_s=20.0), journal=tmp_path, journal_bytes=2_000)
    control.submit(submission("a"), submission("b"))
    control.iteration("a")
    for _ in range(10):
        control.service.call(Enter(job=JobId("a"), kind=ROLLOUT, holder="a.1"))
        control.pass_time(4.0, beats="a")
    assert set(control.service.cluster.placements) == {"a"}
    control.service.close()


def _replayed_beliefs(path: Path) -> dict[JobId, Belief]:
    """Beliefs of a policy after a replay of every decision in the file."""
    policy: PhaseRuntime | None = None
    for line in read_journal(path):
        match line:
            case Opened():
                policy = PhaseRuntime.from_config(line.config)
                if line.snapshot is not None:
                    policy.restore(line.snapshot)
            case Decided():
                assert policy is not None
                policy.observe(msgspec.convert(line.sample, PhaseRuntime.SAMPLE), now=line.t_s)
    assert policy is not None
    return {job: facts.belief() for job, facts in policy.cluster.planner.facts.items()}


def test_decisions_that_a_full_disk_refused_are_counted_and_the_rest_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_given: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    control = Control(journal=tmp_path)
    control.submit(submission("a"))
    with monkeypatch.context() as patched:
        patched.setattr(JournalWriter, "_append", full)
        assert control.runs("a")
        control.pass_time(20.0, beats="a")
    control.leave("a")
    control.iteration("a")
    control.service.close()
    found = [line for line in read_journal(tmp_path / NAME) if isinstance(line, Opened)]
    assert [line.missing > 0 for line in found] == [False, True]
    archive = Archive(tmp_path)
    archive.end()
    assert archive.decisions > 10


def test_a_full_disk_when_the_journal_is_full_too_changes_no_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_given: object) -> None:
        raise Exhausted("no space left")

    control = Control(state=tmp_path / "state.sqlite", journal=tmp_path, journal_bytes=2_000)
    control.submit(submission("a"))
    with monkeypatch.context() as patched:
        patched.setattr(ControlState, "keep", full)
        with pytest.raises(Exhausted):
            control.enter("a")
    control.service.tick()
    control = control.restarted()
    control.iteration("a")
    control.service.close()
    archive = Archive(tmp_path)
    archive.look()
    archive.end()
