"""A worker's pieces over a slot's real pages."""

import math
import threading

import pytest

from coserve.guest.guest_slot import GuestSlot
from coserve.law.work_gate import WorkGate
from harvester.contracts.clock import VirtualClock
from harvester.contracts.page import GrantMode
from tests.unit.coserve.conftest import HOUR_NS, Slot

WITHIN_S = 20.0


@pytest.fixture
def gate(slot: Slot) -> WorkGate:
    return WorkGate(slot.directory)


def test_beside_idle_production_work_goes_at_full_speed(gate: WorkGate) -> None:
    done = 0
    for _ in range(50):
        with gate.piece():
            done += 1
    assert done == 50
    assert gate.budget_s() > 0.5


def test_each_call_reads_the_present_pages(slot: Slot, gate: WorkGate) -> None:
    assert gate.budget_s() > 0.0
    slot.production_arrives()
    assert gate.budget_s() < 0.0
    slot.pulse()
    assert gate.budget_s() > 0.0
    slot.grant(ttl_ns=0)
    assert gate.budget_s() == -math.inf
    slot.grant(mode=GrantMode.CLOSED, pulses=("pulse.prod.1",))
    assert gate.budget_s() == -math.inf
    slot.grant(pulses=("../grant",))
    assert gate.budget_s() == -math.inf


def test_a_grant_of_an_hour_is_obeyed_for_seconds(slot: Slot, gate: WorkGate) -> None:
    slot.grant(mode=GrantMode.UNGATED, ttl_ns=HOUR_NS, age_ns=6_000_000_000)
    assert gate.budget_s() == -math.inf


def test_a_piece_without_slack_is_late_and_not_stuck(slot: Slot) -> None:
    clock = VirtualClock()
    gate = WorkGate(slot.directory, clock=clock)
    slot.production_arrives()
    assert not gate.admits("weights")
    clock.advance_to(0.5)
    assert gate.admits("weights")
    assert not gate.admits("weights")


def test_in_a_withheld_slice_no_piece_goes_however_late(slot: Slot) -> None:
    clock = VirtualClock()
    gate = WorkGate(slot.directory, clock=clock)
    slot.grant(mode=GrantMode.CLOSED, withheld=True)
    assert not gate.admits("weights")
    clock.advance_to(1000.0)
    assert not gate.admits("weights")
    assert gate.budget_s() == -math.inf
    slot.grant(mode=GrantMode.CLOSED)
    assert gate.admits("weights")


def test_pieces_of_one_kind_say_nothing_of_another(slot: Slot) -> None:
    clock = VirtualClock()
    gate = WorkGate(slot.directory, clock=clock)
    gate.expect("wake", 3.0)
    assert not gate.admits("wake"), "an idle production has less slack than that"
    assert gate.admits("weights")
    with gate.measured("wake"):
        clock.advance_to(0.1)
    clock.advance_to(1000.0)
    assert gate.admits("wake")


def test_a_guest_that_owes_memory_works_without_a_limit(
    slot: Slot, guest: GuestSlot, gate: WorkGate
) -> None:
    guest.load.kv_tokens_total = 1000
    guest.publish()
    slot.production_arrives()
    for withheld in (False, True):
        slot.grant(kv_budget_tokens=400, withheld=withheld)
        assert gate.budget_s() == math.inf
    slot.grant(kv_budget_tokens=400)
    guest.load.kv_tokens_withheld = 600
    guest.publish()
    assert gate.budget_s() < 0.0


@pytest.mark.parametrize(("piece_s", "most"), [(0.04, 1), (0.02, 2), (0.005, 8)])
def test_pieces_that_run_at_once_fit_together_into_the_slack(
    slot: Slot, piece_s: float, most: int
) -> None:
    slot.grant(ttft_slo_s=0.0700001)  # 50 ms of it are slack.
    gate = WorkGate(slot.directory, clock=VirtualClock())
    gate.expect("weights", piece_s)
    running, counted, end = threading.Semaphore(0), [0], threading.Event()

    def work() -> None:
        with gate.piece():
            counted[0] += 1
            running.release()
            end.wait(WITHIN_S)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(most):
        assert running.acquire(timeout=WITHIN_S)
    assert not running.acquire(timeout=0.1)
    assert counted == [most]
    end.set()
    for thread in threads:
        thread.join(WITHIN_S)
    assert counted == [8]


def test_pieces_do_not_pause_while_a_caller_waits_for_all_of_them(slot: Slot) -> None:
    gate = WorkGate(slot.directory, clock=VirtualClock())
    slot.production_arrives()
    done = threading.Event()

    def work() -> None:
        for _ in range(3):
            with gate.piece():
                pass
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not done.wait(0.1), "on this clock no time passes, and there is no slack"
    with gate.hurry():
        assert done.wait(WITHIN_S)
    thread.join()
