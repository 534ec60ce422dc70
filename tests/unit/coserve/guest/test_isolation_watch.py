"""A guest's isolation reports while groups and classes change."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from coserve.guest import isolation
from coserve.guest.guest_slot import GuestSlot
from coserve.guest.isolation import IDLE_CLASS
from coserve.guest.isolation_watch import IsolationWatch
from harvester.contracts.isolation import IsolationBackend
from harvester.contracts.process import ProcessId, process_ids
from harvester.platform.scheduling_group import CpuPriority
from tests.unit.coserve.conftest import Slot


def _sleeping() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid


guest_pid = pytest.fixture(_sleeping)
production_pid = pytest.fixture(_sleeping)


@pytest.fixture
def watch(slot: Slot, guest: GuestSlot, guest_pid: int, production_pid: int) -> IsolationWatch:
    """A watch for a guest in the idle class beside production, in one group."""
    isolation.apply_to_process(IDLE_CLASS, guest_pid)
    guest.load.isolation = IsolationBackend.IDLE
    guest.load.processes = process_ids([guest_pid])
    (root,) = process_ids([production_pid])
    slot.grant()
    slot.pulse(root=root)
    watch = guest.isolation_watch()
    assert watch is not None
    return watch


def said(slot: Slot, guest: GuestSlot) -> tuple[float, str]:
    guest.publish()
    record = slot.directory.guest_reader().read().record
    assert record is not None
    return record.blocking_ratio, record.isolation_fault


def test_promises_nothing_before_it_has_looked(
    slot: Slot, guest: GuestSlot, watch: IsolationWatch
) -> None:
    assert said(slot, guest) == (1.0, "not looked at yet")
    watch.look()
    assert said(slot, guest) == (IDLE_CLASS.blocking_ratio, "")


def test_a_guest_that_is_lifted_counts_whole_until_it_is_back(
    slot: Slot, guest: GuestSlot, watch: IsolationWatch, guest_pid: int
) -> None:
    watch.look()
    isolation.lift_from_process(guest_pid)
    watch.look()
    ratio, fault = said(slot, guest)
    assert (ratio, "no effect" in fault) == (1.0, True)
    isolation.apply_to_process(IDLE_CLASS, guest_pid)
    watch.look()
    assert said(slot, guest) == (IDLE_CLASS.blocking_ratio, "")


def test_production_s_threads_that_move_to_another_group_are_noticed(
    slot: Slot,
    guest: GuestSlot,
    watch: IsolationWatch,
    production_pid: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = isolation.priorities

    def moved(pid: int) -> frozenset[CpuPriority]:
        stray = {CpuPriority("/system.slice/serving", False)} if pid == production_pid else set()
        return real(pid) | stray

    watch.look()
    monkeypatch.setattr(isolation, "priorities", moved)
    watch.look()
    ratio, fault = said(slot, guest)
    assert (ratio, "/system.slice/serving" in fault) == (1.0, True)


def test_isolation_against_unseen_processes_does_not_hold(
    slot: Slot, guest: GuestSlot, watch: IsolationWatch, production_pid: int
) -> None:
    (root,) = process_ids([production_pid])
    for root_said, why in (
        (None, "does not name"),
        (ProcessId(pid=root.pid, start_ticks=root.start_ticks + 1), "cannot be seen"),
    ):
        slot.pulse(root=root_said)
        watch.look()
        ratio, fault = said(slot, guest)
        assert (ratio, why in fault) == (1.0, True), fault
    slot.pulse(root=root, ttl_ns=0)
    watch.look()
    assert "expired" in said(slot, guest)[1]
    slot.pulse(root=root)
    watch.look()
    assert said(slot, guest)[1] == ""
    slot.grant(ttl_ns=0)
    watch.look()
    assert "no grant" in said(slot, guest)[1]


def test_every_engine_of_the_slot_counts(
    slot: Slot, guest: GuestSlot, watch: IsolationWatch
) -> None:
    slot.grant(pulses=("pulse.prod.0", "pulse.other.0"))
    watch.look()
    assert "pulse.other.0" in said(slot, guest)[1]


def test_a_worker_of_the_guest_outside_the_class_is_noticed(
    slot: Slot, guest: GuestSlot, watch: IsolationWatch
) -> None:
    guest.load.processes = (*guest.load.processes, *process_ids([os.getpid()]))
    watch.look()
    assert said(slot, guest)[0] == 1.0


@pytest.mark.parametrize("backend", ["", "time-slicing", "mps", "none"])
def test_a_backend_without_thread_order_is_not_watched_and_promises_nothing(
    backend: str, slot: Slot, guest: GuestSlot
) -> None:
    guest.load.isolation = backend
    assert guest.isolation_watch() is None
    assert said(slot, guest) == (1.0, "")
