"""Failed nodes: the jobs that restart, their places, and the jobs left undisturbed."""

import pytest

from benchmarks.rollmux.resubmitting import ResubmittingPlanner
from harvester.contracts.ids import JobId, NodeId
from scheduler.model import PhaseKind, Placement
from scheduler.rollmux.forecast.judge import Judge
from scheduler.rollmux.planner.group_effects import AssignNodes
from scheduler.rollmux.planner.planner import GroupPlanner
from tests.unit.scheduler.rollmux.planner.planned_jobs import TYPES, moves, planned_job, restarts

HOUR_S = 3600.0


def _planner(*names: str, kind: type[GroupPlanner] = GroupPlanner) -> GroupPlanner:
    planner = kind(Judge(), TYPES)
    for name in names:
        planner.place_job(planned_job(name, 400, 150), now=0.0)
    return planner


def _placement(planner: GroupPlanner, name: str) -> Placement:
    job = JobId(name)
    return planner.table.groups[planner.table.home[job]].pinned[job]


def _training_node(planner: GroupPlanner, name: str) -> NodeId:
    return _placement(planner, name).training_nodes[0]


def test_a_lost_node_is_replaced_for_all_its_jobs_and_nothing_else_changes() -> None:
    planner = _planner("a", "b", "c")
    before = {name: _placement(planner, name) for name in "abc"}
    price = planner.table.price_per_hour()
    lost = _training_node(planner, "a")
    on_it = {name for name in "abc" if lost in before[name].training_nodes}
    assert len(on_it) > 1
    planner.table.take_changes()
    effects = planner.fail_node(lost, now=HOUR_S)
    came, gone = planner.table.take_changes()
    (fresh,) = came
    again = {one.placement.job: one.placement for one in restarts(effects)}
    assert set(again) == on_it
    for name in "abc":
        expected = fresh if name in on_it else before[name].training_nodes[0]
        assert _placement(planner, name).training_nodes == (expected,)
        assert _placement(planner, name).rollout_nodes == before[name].rollout_nodes
    assert gone == [lost]
    assert planner.table.price_per_hour() == price


def test_a_lost_iteration_earns_no_credit() -> None:
    planner = _planner("a")
    account = planner.facts[JobId("a")].account
    for phase, solo_s in ((PhaseKind.ROLLOUT, 400.0), (PhaseKind.TRAINING, 150.0)):
        planner.observe_phase(JobId("a"), phase, solo_s, now=600.0)
    whole_s = account.solo_s
    planner.observe_phase(JobId("a"), PhaseKind.ROLLOUT, 390.0, now=1000.0)
    planner.fail_node(_training_node(planner, "a"), now=1001.0)
    assert account.solo_s == whole_s
    planner.fail_node(_training_node(planner, "a"), now=1002.0)
    assert account.solo_s == whole_s


def _moved(planner: GroupPlanner, name: str) -> AssignNodes:
    """Asks a job to move to a group of its own; it is still where it was."""
    planner.packer.now_s = HOUR_S
    group = planner.table.groups[planner.table.home[JobId(name)]]
    found = planner.relocation.relocate((JobId(name),), group)
    assert found
    effects = planner._announce(found, "a test", now=HOUR_S)
    return moves(effects)[0]


def test_a_mover_whose_old_node_fails_begins_again_on_its_new_ones_at_once() -> None:
    planner = _planner("a", "b")
    lost = _training_node(planner, "b")
    move = _moved(planner, "b")
    effects = planner.fail_node(lost, now=HOUR_S)
    again = {one.placement.job: one.placement for one in restarts(effects)}
    assert again[JobId("b")] == move.placement
    assert not planner.table.leaving_groups(JobId("b"))
    assert not planner.facts[JobId("b")].moving


def test_a_mover_whose_new_node_fails_moves_on_to_its_replacement_and_loses_nothing() -> None:
    planner = _planner("a", "b")
    move = _moved(planner, "b")
    facts = planner.facts[JobId("b")]
    facts.open_s = 300.0
    effects = planner.fail_node(move.placement.training_nodes[0], now=HOUR_S)
    (changed,) = moves(effects)
    assert changed.placement == _placement(planner, "b") != move.placement
    assert not restarts(effects)
    assert facts.moving
    assert facts.open_s == 300.0
    planner.complete_move(JobId("b"), now=2 * HOUR_S)
    assert len(planner.table.groups) == 2


def test_resubmitted_jobs_take_the_cheapest_opening_and_the_node_is_gone() -> None:
    planner = _planner("a", "b", "c", kind=ResubmittingPlanner)
    lost = _training_node(planner, "a")
    on_it = {JobId(name) for name in "abc" if lost == _training_node(planner, name)}
    planner.table.take_changes()
    effects = planner.fail_node(lost, now=HOUR_S)
    assert {one.placement.job for one in restarts(effects)} == on_it
    assert lost in planner.table.take_changes()[1]
    assert lost not in planner.table.nodes
    assert all(lost != _training_node(planner, name) for name in "abc")


@pytest.mark.parametrize("kind", [GroupPlanner, ResubmittingPlanner])
def test_an_unknown_or_already_failed_node_changes_nothing(kind: type[GroupPlanner]) -> None:
    planner = _planner("a", kind=kind)
    lost = _training_node(planner, "a")
    assert planner.fail_node(NodeId("elsewhere"), now=1.0) == ()
    planner.fail_node(lost, now=2.0)
    assert planner.fail_node(lost, now=3.0) == ()
