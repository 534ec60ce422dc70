"""The ledger of host memory: a hard limit, and a job's state on a node once."""

import pytest

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import Placement, Pool
from scheduler.rollmux.planner.group_table import GroupTable
from scheduler.rollmux.planner.residency import Residency
from tests.unit.scheduler.rollmux.planner.planned_jobs import TYPES

A, B = JobId("a"), JobId("b")
R0, R1, T0 = NodeId("r0"), NodeId("r1"), NodeId("t0")
HOST_BYTES = {Pool.ROLLOUT: 1000, Pool.TRAINING: 500}


def _placement(job: JobId, rollout: NodeId) -> Placement:
    return Placement(job=job, rollout_nodes=(rollout,), training_nodes=(T0,))


def test_a_job_is_where_it_was_last_held_and_nowhere_else() -> None:
    ledger = Residency(HOST_BYTES)
    ledger.keep(A, (R0, T0, T0), 300)
    assert (ledger.nodes_of(A), ledger.jobs_on(T0)) == ((R0, T0), (A,))
    assert ledger.free_bytes(T0, Pool.TRAINING) == 200
    ledger.keep(A, (R1,), 300)
    assert (ledger.nodes_of(A), ledger.jobs_on(T0)) == ((R1,), ())
    assert ledger.free_bytes(T0, Pool.TRAINING) == 500
    ledger.keep(A, (), 0)
    assert ledger.nodes_of(A) == ()


def test_a_placement_has_room_where_every_node_has_or_the_job_is_there_already() -> None:
    ledger = Residency(HOST_BYTES)
    ledger.keep(A, (R0, T0), 300)
    assert not ledger.has_room(_placement(B, R0), 300)
    assert ledger.has_room(_placement(B, R0), 200)
    assert ledger.has_room(_placement(A, R1), 300)
    assert ledger.kept(A, _placement(A, R1)) == (T0,)


def test_a_lost_node_s_jobs_are_to_be_on_the_fresh_one() -> None:
    ledger = Residency(HOST_BYTES)
    ledger.keep(A, (R0, T0), 300)
    ledger.replace(R0, R1)
    assert ledger.nodes_of(A) == (R1, T0)
    assert (ledger.jobs_on(R0), ledger.jobs_on(R1)) == ((), (A,))
    ledger.replace(R0, NodeId("r2"))
    assert ledger.nodes_of(A) == (R1, T0)


def test_a_move_that_keeps_a_node_needs_its_memory_there_once() -> None:
    table = GroupTable(TYPES)
    group = table.fresh_group()
    first, second = _placement(A, R0), _placement(A, R1)
    table.pin(first, group, 1500)
    table.unpin(A, stays_resident=True)
    table.pin(second, group, 1500)
    assert table.resident.nodes_of(A) == (R1, T0, R0)
    assert table.planned.nodes_of(A) == (R1, T0)
    assert table.resident.free_bytes(T0, Pool.TRAINING) == 500
    assert table.resident.free_bytes(R0, Pool.ROLLOUT) == 500
    table.left(A)
    assert R0 not in table.nodes
    assert table.resident.nodes_of(A) == (R1, T0)


def test_the_book_refuses_what_memory_cannot_hold_and_stays_as_it_was() -> None:
    table = GroupTable(TYPES)
    group = table.fresh_group()
    table.pin(_placement(A, R0), group, 1500)
    with pytest.raises(ValueError, match="lack 600 bytes"):
        table.pin(_placement(B, R0), group, 600)
    assert list(group.pinned) == [A]
    assert table.resident.jobs_on(R0) == (A,)
    assert table.up == {Pool.ROLLOUT: 1, Pool.TRAINING: 1}
