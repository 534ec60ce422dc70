"""Weight sync: a phase of an iteration that holds no node, in forecasts and in estimates."""

import numpy as np
import pytest

from harvester.contracts.ids import JobId
from scheduler.model import JobSpec, PhaseKind, PhaseSpec
from scheduler.rollmux.beliefs.durations import Belief
from scheduler.rollmux.beliefs.facts import JobFacts
from scheduler.rollmux.forecast.execution import advance
from scheduler.rollmux.forecast.forecast import Occupant, Roster
from scheduler.rollmux.forecast.stages import (
    EVENT,
    ROLLOUT_STARTED,
    SYNC_ENDED,
    TRAINING_ENDED,
    TRAINING_STARTED,
    Rules,
    empty_nodes,
    empty_permits,
)
from tests.unit.scheduler.rollmux.forecast.stage_jobs import exact_slowdowns, occupant
from tests.unit.scheduler.rollmux.planner.planned_jobs import planned_job

PLAIN = Rules(migrate=False, warm_s=0.0, migrate_s=0.0)
ROLLOUT, TRAINING, SYNC = PhaseKind.ROLLOUT, PhaseKind.TRAINING, PhaseKind.SYNC


def _synced(rollout_s: float, training_s: float, sync_s: float) -> Occupant:
    belief = Belief(rollout_s, 0.0, 0.0, training_s, 0.0, 0.0, sync_s)
    return Occupant(1, 2, 2.0, belief, 1.0, 0.25)


def _run(*members: Occupant, until_s: float) -> list[tuple[float, int, int]]:
    """Time, kind and job of every event."""
    roster = Roster.of(list(members))
    jobs = roster.jobs.copy()
    jobs["offset"], jobs["length"] = np.arange(jobs.size), 1
    lengths_s = np.ascontiguousarray(roster.beliefs[:, :, 0])
    log = np.zeros(512, dtype=EVENT)
    nodes, permits = empty_nodes(), empty_permits()
    _, logged, _ = advance(jobs, nodes, permits, lengths_s, PLAIN, 0.0, until_s, log)
    return [(t_s, kind, job) for t_s, kind, job, _ in log[:logged].tolist()]


def test_the_next_rollout_waits_for_the_sync_and_the_sync_for_nothing() -> None:
    found = _run(_synced(100.0, 50.0, 20.0), until_s=341.0)
    times = {
        kind: [t_s for t_s, each, _ in found if each == kind]
        for kind in (ROLLOUT_STARTED, TRAINING_ENDED, SYNC_ENDED)
    }
    assert times[TRAINING_ENDED] == [150.0, 320.0]
    assert times[SYNC_ENDED] == [170.0, 340.0]
    assert times[ROLLOUT_STARTED] == [0.0, 170.0, 340.0]


def test_a_syncing_job_keeps_no_node_and_blocks_no_job_in_line() -> None:
    """While the first syncs, the other trains on its node and rolls out on its other one."""
    found = _run(_synced(100.0, 60.0, 300.0), _synced(100.0, 60.0, 1.0), until_s=450.0)
    other = [(t_s, kind) for t_s, kind, job in found if job == 1]
    assert (200.0, TRAINING_STARTED) in other
    assert (261.0, ROLLOUT_STARTED) in other
    assert (361.0, TRAINING_STARTED) in other


def test_a_sync_counts_as_time_alone() -> None:
    (alone,) = exact_slowdowns([_synced(100.0, 50.0, 20.0)], PLAIN)
    assert alone == pytest.approx(1.0)
    beside = [_synced(100.0, 50.0, 200.0), _synced(100.0, 50.0, 200.0)]
    assert max(exact_slowdowns(beside, PLAIN)) == pytest.approx(1.0, abs=0.01)
    without = [occupant(100.0, 50.0), occupant(100.0, 50.0)]
    assert max(exact_slowdowns(without, PLAIN)) > 1.3


def _job(*, sync_max_s: float | None) -> JobSpec:
    declared = ((ROLLOUT, 400.0, 1), (TRAINING, 200.0, 1), (SYNC, sync_max_s, 0))
    return JobSpec(
        job=JobId("a"),
        tenant=planned_job("a", 1, 1).tenant,
        phases=tuple(
            PhaseSpec(kind=kind, max_s=most, nodes=nodes)
            for kind, most, nodes in declared
            if most is not None
        ),
        host_bytes=400,
        slo=1.5,
    )


def _facts(*, sync_max_s: float | None = 40.0) -> JobFacts:
    return JobFacts.of(_job(sync_max_s=sync_max_s), cold_start_s=0.0, now=0.0)


def test_a_declared_sync_is_believed_and_then_learned() -> None:
    facts = _facts()
    assert facts.belief().sync_s == pytest.approx(30.0)
    for _ in range(40):
        for kind, solo_s in ((ROLLOUT, 300.0), (TRAINING, 150.0), (SYNC, 20.0)):
            facts.observe(kind, solo_s)
    belief = facts.belief()
    assert belief.sync_s == pytest.approx(20.0, rel=0.01)
    assert belief.iteration_s == pytest.approx(470.0, rel=0.01)
    assert facts.account.solo_s == pytest.approx(40 * 470.0)


def test_an_undeclared_sync_is_learned_from_its_observation() -> None:
    facts = _facts(sync_max_s=None)
    assert facts.belief().sync_s == 0.0
    facts.observe(ROLLOUT, 300.0)
    facts.observe(TRAINING, 150.0)
    assert facts.next_phase is ROLLOUT
    facts.observe(SYNC, 20.0)
    assert facts.belief().sync_s > 0.0
    facts.observe(ROLLOUT, 300.0)
    facts.observe(TRAINING, 150.0)
    assert facts.next_phase is SYNC


@pytest.mark.parametrize("ended", [(ROLLOUT,), (ROLLOUT, TRAINING)])
def test_a_lost_iteration_loses_every_phase_of_it_that_has_ended(
    ended: tuple[PhaseKind, ...],
) -> None:
    facts = _facts()
    for kind in (ROLLOUT, TRAINING, SYNC):
        facts.observe(kind, 100.0)
    assert facts.account.solo_s == 300.0
    for kind in ended:
        facts.observe(kind, 70.0)
    facts.lose_iteration()
    assert facts.account.solo_s == 300.0
    assert facts.next_phase is ROLLOUT
    facts.lose_iteration()
    assert facts.account.solo_s == 300.0


def test_a_sync_that_runs_as_long_as_expected_is_no_delay() -> None:
    facts = _facts()
    for kind in (ROLLOUT, TRAINING, SYNC):
        for _ in range(30):
            facts.observe(kind, 20.0)
    facts.account.solo_s, facts.account.began_s = 1000.0, -1000.0
    facts.observe(TRAINING, 20.0)
    facts.seen_s = 0.0
    before_s = facts.settled_credit_s(0.0)
    assert facts.settled_credit_s(20.0) == pytest.approx(before_s, abs=0.5)
    assert facts.settled_credit_s(50.0) == pytest.approx(before_s - 30.0, abs=0.5)
