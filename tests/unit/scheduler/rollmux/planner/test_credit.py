"""Credit in planning: neighbours owe the rest to a job with less than its reserve."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harvester.contracts.ids import JobId
from scheduler.model import Completion, JobSpec
from scheduler.rollmux.beliefs.slo import NEEDS_DEDICATED_NODES, RESERVE_ITERATIONS, SloProgress
from scheduler.rollmux.beliefs.tail import UNDIVIDED
from scheduler.rollmux.forecast.forecast import Roster
from scheduler.rollmux.forecast.judge import Judge
from scheduler.rollmux.planner.group_effects import AssignNodes
from scheduler.rollmux.planner.group_table import GroupState
from scheduler.rollmux.planner.planner import GroupPlanner, PlannerConfig
from scheduler.sim.rollmux.baselines import PAPER_TAIL, WorstCase
from tests.unit.scheduler.rollmux.planner.planned_jobs import TYPES, moves, planned_job, with_curve

HOUR_S = 3600.0
ITERATION_S = 550.0
DAY_S = 24 * HOUR_S
TIGHT = planned_job("tight", 400, 150, slo=1.15)
EASY = planned_job("easy", 380, 120, slo=1.9)


def _with_credit(credit_s: float, *, slo: float, solo_s: float = DAY_S) -> SloProgress:
    """An account at time 0."""
    return SloProgress(slo=slo, began_s=credit_s - slo * solo_s, solo_s=solo_s)


def test_credit_at_the_reserve_leaves_the_slo_as_it_was_promised() -> None:
    account = _with_credit(RESERVE_ITERATIONS * ITERATION_S, slo=1.2)
    assert account.slo_ahead(0.0, iteration_s=ITERATION_S) == pytest.approx(1.2)


def test_a_young_job_needs_no_reserve_that_it_could_not_have_saved() -> None:
    account = _with_credit(0.5 * 0.2 * 600.0, slo=1.2, solo_s=600.0)
    assert account.slo_ahead(0.0, iteration_s=ITERATION_S) == pytest.approx(1.2)


@given(st.floats(1.0, 3.0), st.floats(-1e5, 1e5), st.floats(0.0, 1e5))
def test_the_slo_ahead_follows_the_credit_and_is_never_faster_than_alone(
    slo: float, credit_s: float, more_s: float
) -> None:
    less, more = (
        _with_credit(each_s, slo=slo).slo_ahead(0.0, iteration_s=ITERATION_S)
        for each_s in (credit_s, credit_s + more_s)
    )
    assert less <= more
    assert all(each == NEEDS_DEDICATED_NODES or each >= 1.0 for each in (less, more))


@pytest.mark.parametrize(("slo", "alone"), [(1.001, True), (1.5, False)])
def test_a_job_with_almost_no_slack_gets_dedicated_nodes_until_it_has_credit(
    slo: float, alone: bool
) -> None:
    account = _with_credit(0.0, slo=slo)
    owed = account.slo_ahead(0.0, iteration_s=ITERATION_S)
    assert (owed == NEEDS_DEDICATED_NODES) is alone


def test_work_under_way_is_no_delay() -> None:
    account = _with_credit(400.0, slo=1.001)
    later_s = 300.0
    assert account.slo_ahead(later_s, iteration_s=ITERATION_S) == NEEDS_DEDICATED_NODES
    owed = account.slo_ahead(later_s, iteration_s=ITERATION_S, under_way_s=later_s)
    assert owed >= 1.0


HALF_TAIL = (Completion(0.5, 0.8),)
"""Half of a rollout's time is a tail: the forecast of the two has delays in it."""


def _beside_each_other() -> GroupPlanner:
    """A tight job and an easy one that the forecast allows to share nodes, both well known."""
    planner = GroupPlanner(Judge(), TYPES, PlannerConfig())
    for job in (TIGHT, EASY):
        planner.place_job(with_curve(job, *HALF_TAIL), now=0.0)
        _learn(planner, job)
    (group,) = planner.table.groups.values()
    assert planner.packer.judge.admits(Roster.of(planner.packer.occupants(group)))
    _settle(planner, EASY, credit_s=DAY_S, now=DAY_S)
    return planner


def _learn(planner: GroupPlanner, job: JobSpec) -> None:
    for _ in range(40):
        for phase, ratio in zip(job.phases, (0.8, 0.7), strict=True):
            planner.observe_phase(job.job, phase.kind, phase.max_s * ratio, now=0.0)


def _settle(planner: GroupPlanner, job: JobSpec, *, credit_s: float, now: float) -> None:
    account = planner.facts[job.job].account
    account.solo_s = DAY_S
    account.began_s = now + credit_s - account.slo * account.solo_s


def test_a_job_slower_than_forecast_gets_dedicated_nodes_before_its_credit_is_spent() -> None:
    """Beliefs stay right: only the credit shows that the forecast of this group errs."""
    planner, now = _beside_each_other(), DAY_S
    _settle(planner, TIGHT, credit_s=1500.0, now=now)
    account = planner.facts[TIGHT.job].account
    moved: list[AssignNodes] = []
    while not moved and account.credit_s(now) > -HOUR_S:
        now += 0.5 * HOUR_S
        account.solo_s += 0.5 * HOUR_S / (account.slo + 0.1)
        planner.facts[EASY.job].account.solo_s += 0.5 * HOUR_S / 1.5
        effects = planner.review(now=now)
        moved = moves(effects)
    assert len(moved) == 1
    assert moved[0].reason.startswith(
        f"the promise to {TIGHT.job} was at risk: forecast slow-down "
    )
    assert f"keeps its SLO of {account.slo:.2f}; costs " in moved[0].reason
    assert account.credit_s(now) > 0.0
    assert planner.table.home[TIGHT.job] != planner.table.home[EASY.job]


def test_a_newcomer_goes_elsewhere_while_it_would_take_what_is_owed() -> None:
    homes = {}
    for credit_s in (HOUR_S, -HOUR_S):
        planner = GroupPlanner(Judge(), TYPES, PlannerConfig())
        planner.place_job(TIGHT, now=0.0)
        _learn(planner, TIGHT)
        _settle(planner, TIGHT, credit_s=credit_s, now=DAY_S)
        planner.place_job(EASY, now=DAY_S)
        homes[credit_s] = planner.table.home
    assert homes[HOUR_S][EASY.job] == homes[HOUR_S][TIGHT.job]
    assert homes[-HOUR_S][EASY.job] != homes[-HOUR_S][TIGHT.job]


def test_a_newcomer_goes_elsewhere_while_its_load_would_take_what_a_job_has() -> None:
    homes = {}
    for load_s in (100.0, 2 * HOUR_S):
        planner = GroupPlanner(Judge(), TYPES, PlannerConfig(cold_start_s=load_s))
        planner.place_job(TIGHT, now=0.0)
        _learn(planner, TIGHT)
        _settle(planner, TIGHT, credit_s=HOUR_S, now=DAY_S)
        planner.place_job(EASY, now=DAY_S)
        homes[load_s] = planner.table.home
    assert homes[100.0][EASY.job] == homes[100.0][TIGHT.job]
    assert homes[2 * HOUR_S][EASY.job] != homes[2 * HOUR_S][TIGHT.job]


def test_a_saving_is_refused_at_the_cost_of_a_job_short_of_credit() -> None:
    short, mover = planned_job("short", 400, 150, slo=1.9), planned_job("mover", 380, 120, slo=1.5)
    moved = {}
    # The mover loads beside it, under its own permits.
    for credit_s, load_s in ((HOUR_S, 300.0), (-2 * HOUR_S, 300.0), (HOUR_S, 3 * HOUR_S)):
        planner = GroupPlanner(Judge(), TYPES, PlannerConfig())
        for job in (short, mover):
            planner.place_job(job, now=0.0)
            _learn(planner, job)
        planner.packer.now_s = DAY_S
        _settle(planner, short, credit_s=HOUR_S, now=DAY_S)
        _settle(planner, mover, credit_s=DAY_S, now=DAY_S)
        home = planner.table.groups[planner.table.home[mover.job]]
        assert planner.relocation.relocate((mover.job,), home)
        planner.table.left(mover.job)
        _settle(planner, short, credit_s=credit_s, now=DAY_S)
        planner.packer.load_s = load_s
        found = planner.regroup.improve(now=DAY_S)
        moved[credit_s, load_s] = [move.job for move in found]
    assert [*moved.values()] == [[mover.job], [], []]


def test_the_paper_s_planner_fills_a_group_up_to_its_moved_tails() -> None:
    """Two rollouts of 300 s fill a node for 375 s of a cycle of 400 s; without tails for 600 s."""
    placed = {}
    for tail in (PAPER_TAIL, UNDIVIDED):
        planner = GroupPlanner(WorstCase(planned_tail=tail), TYPES, PlannerConfig(moves=False))
        jobs = [planned_job(name, 300, 100, slo=2.0, host=200) for name in "abc"]
        for job in jobs:
            planner.place_job(job, now=0.0)
        placed[tail] = sorted(len(group.pinned) for group in planner.table.groups.values())
    assert placed[PAPER_TAIL] != placed[UNDIVIDED]
    assert max(placed[PAPER_TAIL]) > max(placed[UNDIVIDED])


def test_the_paper_s_planner_knows_no_credit() -> None:
    planner = GroupPlanner(WorstCase(), TYPES, PlannerConfig(moves=False))
    planner.place_job(TIGHT, now=0.0)
    _settle(planner, TIGHT, credit_s=-DAY_S, now=DAY_S)
    planner.packer.now_s = DAY_S
    assert planner.packer.slo_now(planner.facts[TIGHT.job]) == TIGHT.slo


@pytest.mark.parametrize("place", range(4))
def test_all_neighbours_leave_a_job_that_a_surprise_would_make_late(place: int) -> None:
    """Three others, each too much for the job; each of them may leave only with the others.

    The forecast of the four is as good as it was.
    """
    late = planned_job("late", 300, 100, slo=1.001, host=200)
    others = [planned_job(f"other-{at}", 100, 20, slo=2.0, host=200) for at in range(3)]
    planner, group = _together([*others[:place], late, *others[place:]])
    for job in others:
        _settle(planner, job, credit_s=DAY_S, now=DAY_S)
    _settle(planner, late, credit_s=-HOUR_S, now=DAY_S)
    moves = {move.placement.job: move.reason for move in _moves(planner)}
    assert sorted(moves) == [job.job for job in others]
    assert list(group.pinned) == [late.job]
    credit_s = planner.facts[late.job].settled_credit_s(DAY_S)
    assert credit_s < 0.0
    why = f"the promise to late was at risk: its credit of {credit_s:.0f} s absorbs no surprise"
    assert all(reason.startswith(why) for reason in moves.values()), moves
    assert "other-0 was at risk" not in moves[others[0].job]
    assert "together with other-1, other-2;" in moves[others[0].job]


@pytest.mark.parametrize("credit_s", [-400.0, -1000.0])
def test_the_job_with_the_larger_gain_moves_if_no_job_can_pay_for_a_move(
    credit_s: float,
) -> None:
    """In six hours a slack of 0.06 regains 1296 s, one of 0.02 432 s; a move needs 700 s.

    Behind by 1000 s neither regains it, and to stay costs both of them more.
    """
    tighter, slower = (planned_job(f"job-{slo}", 280, 120, slo=slo) for slo in (1.02, 1.06))
    planner, _ = _together([tighter, slower])
    for job in (slower, tighter):
        _settle(planner, job, credit_s=credit_s, now=DAY_S)
    assert _moved(planner) == [slower.job]


def test_the_two_of_three_late_jobs_with_the_larger_gains_move() -> None:
    tight = [planned_job(f"job-{slo}", 150, 60, slo=slo) for slo in (1.02, 1.01, 1.03)]
    planner, group = _together(tight)
    for job in tight:
        _settle(planner, job, credit_s=-HOUR_S, now=DAY_S)
    assert sorted(_moved(planner)) == ["job-1.02", "job-1.03"]
    assert list(group.pinned) == ["job-1.01"]


@pytest.mark.parametrize(("end_ratio", "leaves"), [(1.0, False), (0.5, True)])
def test_a_drifting_job_gets_dedicated_nodes_once_its_credit_is_half_an_iteration(
    end_ratio: float, *, leaves: bool
) -> None:
    """A slack of 0.4 would regain in three iterations what a surprise costs; the forecast of the
    two is good either way.
    """
    drifting, easy = (
        planned_job("drifting", 300, 100, slo=1.4),
        planned_job("easy", 60, 20, slo=1.9),
    )
    planner, group = _together([drifting, easy])
    facts = planner.facts[drifting.job]
    for ratio in np.linspace(1.0, end_ratio, 40).tolist():
        for phase, seen in zip(drifting.phases, (0.8, 0.7), strict=True):
            facts.observe(phase.kind, phase.max_s * seen * ratio)
    assert facts.drifts is leaves
    _settle(planner, easy, credit_s=DAY_S, now=DAY_S)
    _settle(planner, drifting, credit_s=0.4 * facts.belief().iteration_s, now=DAY_S)
    facts.seen_s = DAY_S
    assert _moved(planner) == ([easy.job] if leaves else [])
    assert drifting.job in group.pinned


def _together(jobs: list[JobSpec]) -> tuple[GroupPlanner, GroupState]:
    """Puts all jobs on the first one's nodes, regardless of forecasts, and well known."""
    planner = GroupPlanner(Judge(), TYPES, PlannerConfig())
    planner.place_job(jobs[0], now=0.0)
    (group,) = planner.table.groups.values()
    (home,) = group.pinned.values()
    for job in jobs[1:]:
        planner.place_job(job, now=0.0)
        planner.table.unpin(job.job)
        planner.table.pin(replace(home, job=job.job), group, job.host_bytes)
        planner.packer.refresh(group)
    for job in jobs:
        _learn(planner, job)
    return planner, group


def _moved(planner: GroupPlanner) -> list[JobId]:
    return [move.placement.job for move in _moves(planner)]


def _moves(planner: GroupPlanner) -> list[AssignNodes]:
    effects = planner.review(now=DAY_S)
    return moves(effects)


def test_alone_on_its_nodes_a_job_keeps_whatever_it_is_owed() -> None:
    planner = GroupPlanner(Judge(), TYPES, PlannerConfig())
    planner.place_job(TIGHT, now=0.0)
    (group,) = planner.table.groups.values()
    occupants = planner.packer.occupants(group, slo_of=lambda _: NEEDS_DEDICATED_NODES)
    assert planner.packer.judge.admits(Roster.of(occupants))
