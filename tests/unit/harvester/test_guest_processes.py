"""What the agent does to processes that a guest names."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester.agent import guest_processes
from harvester.agent.guest_processes import GuestProcesses
from harvester.contracts.errors import Unsupported
from harvester.contracts.idle_groups import IdleGroups
from harvester.contracts.process import ProcessId, process_ids, start_ticks
from harvester.contracts.scheduling_group import is_idle, scheduling_group

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux only")


def _idle_group() -> bool:
    try:
        IdleGroups().check(os.getpid())
    except Unsupported:
        return False
    return True


privileged = pytest.mark.skipif(os.geteuid() != 0, reason="needs capabilities")


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def named(child: "subprocess.Popen[bytes]") -> tuple[ProcessId, ...]:
    return process_ids([child.pid])


@pytest.fixture
def guest(tmp_path: Path) -> GuestProcesses:
    (tmp_path / "guest").touch()
    return GuestProcesses(tmp_path / "guest", memo=tmp_path / "lifted")


def idle(process: "subprocess.Popen[bytes]") -> bool:
    return os.sched_getscheduler(process.pid) == os.SCHED_IDLE


@privileged
def test_lifts_an_idle_guest_and_puts_it_back(
    child: "subprocess.Popen[bytes]", named: tuple[ProcessId, ...], guest: GuestProcesses
) -> None:
    os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
    assert guest.lift(named)
    assert not idle(child)
    assert guest.lift(named), "once more changes nothing"
    guest.settle()
    assert idle(child)


@pytest.mark.skipif(not _idle_group(), reason="no idle control group can be made here")
def test_lifts_a_guest_out_of_the_idle_group_and_an_agent_that_comes_after_puts_it_back(
    child: "subprocess.Popen[bytes]",
    named: tuple[ProcessId, ...],
    guest: GuestProcesses,
    tmp_path: Path,
) -> None:
    groups = IdleGroups()
    groups.enter(child.pid, guest=child.pid)
    own = scheduling_group(child.pid)
    try:
        assert guest.lift(named)
        assert not is_idle(own)
        GuestProcesses(tmp_path / "guest", memo=tmp_path / "lifted").settle()
        assert is_idle(own)
    finally:
        groups.leave(child.pid)
        groups.clear()


def test_a_guest_in_an_operators_idle_group_is_not_said_to_be_lifted(
    named: tuple[ProcessId, ...], guest: GuestProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_processes, "is_under_idle", lambda group: True)
    assert not guest.lift(named)


@privileged
def test_an_agent_that_comes_after_puts_back_what_the_one_before_had_lifted(
    child: "subprocess.Popen[bytes]",
    named: tuple[ProcessId, ...],
    guest: GuestProcesses,
    tmp_path: Path,
) -> None:
    os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
    guest.lift(named)
    (tmp_path / "guest").unlink()
    GuestProcesses(tmp_path / "guest", memo=tmp_path / "lifted").settle()
    assert idle(child)
    assert not (tmp_path / "lifted").exists()


def test_a_memo_that_is_damaged_is_no_memo(tmp_path: Path) -> None:
    (tmp_path / "lifted").write_bytes(b"{")
    GuestProcesses(tmp_path / "guest", memo=tmp_path / "lifted").settle()


def test_what_was_not_idle_is_not_made_idle(
    child: "subprocess.Popen[bytes]", named: tuple[ProcessId, ...], guest: GuestProcesses
) -> None:
    assert guest.lift(named)
    guest.settle()
    assert not idle(child)


def test_ends_the_guest_s_processes(
    child: "subprocess.Popen[bytes]", named: tuple[ProcessId, ...], guest: GuestProcesses
) -> None:
    assert guest.kill(named)
    assert child.wait(timeout=10) == -9


def test_a_number_that_another_process_has_now_ends_nobody(
    child: "subprocess.Popen[bytes]", guest: GuestProcesses
) -> None:
    began = start_ticks(child.pid)
    assert began is not None
    assert not guest.kill([ProcessId(pid=child.pid, start_ticks=began + 1)])
    assert child.poll() is None


@privileged
def test_processes_of_another_user_than_the_page_s_are_left_alone(
    child: "subprocess.Popen[bytes]",
    named: tuple[ProcessId, ...],
    guest: GuestProcesses,
    tmp_path: Path,
) -> None:
    os.chown(tmp_path / "guest", 65534, 65534)
    assert not guest.kill(named)
    assert child.poll() is None


def test_a_guest_cannot_make_the_agent_end_itself(guest: GuestProcesses) -> None:
    assert not guest.kill(process_ids([os.getpid()]))


@pytest.mark.parametrize("pid", [-1, 0, 1, 4_000_000])
def test_names_that_are_no_process_of_the_guest_s_end_nobody(
    guest: GuestProcesses, pid: int
) -> None:
    assert not guest.kill([ProcessId(pid=pid, start_ticks=start_ticks(pid) or 0)])


def test_without_a_page_there_is_no_guest(
    child: "subprocess.Popen[bytes]", named: tuple[ProcessId, ...], tmp_path: Path
) -> None:
    absent = GuestProcesses(tmp_path / "guest", memo=tmp_path / "lifted")
    assert not absent.kill(named)
    assert child.poll() is None
