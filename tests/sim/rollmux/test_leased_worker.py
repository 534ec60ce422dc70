"""A simulated job on its nodes and on slots beside them."""

import numpy as np
import pytest

from benchmarks.rollmux.lease_supply import W1_TERMS, HeadroomRecord
from benchmarks.rollmux.leased_worker import LeasedWorker
from harvester.contracts.ids import NodeId
from scheduler.sim.rollmux.workload import PAPER_WORLD, w1

HALF = HeadroomRecord(0.5 * np.arange(3601.0))
SYNCED_S = 1000.0
FASTER = 1.25
"""Four slots at half headroom beside eight accelerators."""


def _rolling_out(*, slots: int) -> LeasedWorker:
    worker = LeasedWorker(w1(1, jobs=1)[0], PAPER_WORLD, terms=W1_TERMS, record=HALF)
    worker.begin((NodeId("h20-1"),), loading_s=0.0, share=1.0, now=SYNCED_S)
    worker.resize(slots, recompute=False, now=SYNCED_S)
    return worker


def _bulk_s(worker: LeasedWorker) -> float:
    return 0.5 * worker.length_s


def test_a_bulk_is_faster_by_what_its_slots_give_from_when_they_are_awake() -> None:
    worker = _rolling_out(slots=4)
    assert worker.next_s() == SYNCED_S + W1_TERMS.activation_s
    worker.work_until(worker.next_s())
    worker.take_ready_slots(now=worker.next_s())
    worker.work_until(SYNCED_S + 55.0)
    assert worker.worked_s == pytest.approx(5.0 + 50.0 * FASTER)
    assert worker.slot_s == pytest.approx(4 * 55.0)
    assert worker.given_node_s == pytest.approx(50.0 * (FASTER - 1.0))


def test_slots_serve_only_once_they_hold_the_new_weights() -> None:
    worker = LeasedWorker(w1(1, jobs=1)[0], PAPER_WORLD, terms=W1_TERMS, record=HALF)
    worker.published_s = SYNCED_S - 7.0
    worker.begin((NodeId("h20-1"),), loading_s=0.0, share=1.0, now=SYNCED_S)
    worker.resize(4, recompute=False, now=SYNCED_S)
    assert worker.next_s() == pytest.approx(SYNCED_S - 7.0 + W1_TERMS.sync_s)


def test_a_job_s_measured_saving_is_what_leases_took_off_its_rollout() -> None:
    worker = _rolling_out(slots=4)
    worker.work_until(SYNCED_S + W1_TERMS.activation_s)
    worker.take_ready_slots(now=SYNCED_S + W1_TERMS.activation_s)
    while worker.is_in_bulk:
        at_s = worker.next_s()
        worker.work_until(at_s)
        worker.progress()
    assert worker.is_known_to_be_in_its_tail
    worker.measure_bulk(now=at_s)
    assert worker.leased_s == pytest.approx(_bulk_s(worker) - (at_s - SYNCED_S))
    measured_s = worker.leased_s
    worker.end_bulk()
    while not worker.is_complete:
        at_s = worker.next_s()
        worker.work_until(at_s)
        worker.progress()
    worker.end_rollout(now=at_s)
    assert worker.leased_s == measured_s
    took_s = at_s - SYNCED_S - W1_TERMS.move_s
    assert took_s + worker.leased_s == pytest.approx(worker.length_s)


def test_a_tail_on_slots_is_as_slow_as_they_are_and_stands_still_without() -> None:
    worker = _rolling_out(slots=0)
    worker.work_until(SYNCED_S + 0.7 * worker.length_s)
    worker.tail.state = worker.tail.state.AWAY
    worker.leave_nodes()
    worker.take_tail_slots(worker.tail_slots)
    left_s, at_s = worker.left_s, SYNCED_S + 0.7 * worker.length_s
    moved_s = W1_TERMS.activation_s + W1_TERMS.move_s
    worker.work_until(at_s + moved_s + 20.0)
    assert left_s - worker.left_s == pytest.approx(10.0)
    worker.take_tail_slots(0)
    assert worker.next_s() == float("inf")
    worker.work_until(at_s + moved_s + 60.0)
    assert left_s - worker.left_s == pytest.approx(10.0)
