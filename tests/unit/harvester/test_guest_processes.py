"""What the agent does to processes that a guest names."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester.agent.guest_processes import GuestProcesses

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux only")


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "guest").touch()
    return tmp_path / "guest"


@pytest.mark.skipif(os.geteuid() != 0, reason="leaving the idle class needs a capability")
def test_lifts_an_idle_guest_and_puts_it_back(child: "subprocess.Popen[bytes]", page: Path) -> None:
    os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
    guest = GuestProcesses(page)
    assert guest.lift((child.pid,))
    assert os.sched_getscheduler(child.pid) == os.SCHED_OTHER
    guest.settle((child.pid,))
    assert os.sched_getscheduler(child.pid) == os.SCHED_IDLE


def test_what_was_not_idle_is_not_made_idle(child: "subprocess.Popen[bytes]", page: Path) -> None:
    guest = GuestProcesses(page)
    assert guest.lift((child.pid,))
    guest.settle((child.pid,))
    assert os.sched_getscheduler(child.pid) == os.SCHED_OTHER


def test_ends_the_guest_s_processes(child: "subprocess.Popen[bytes]", page: Path) -> None:
    assert GuestProcesses(page).kill((child.pid,))
    assert child.wait(timeout=10) == -9


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs a capability")
def test_processes_of_another_user_than_the_page_s_are_left_alone(
    child: "subprocess.Popen[bytes]", page: Path
) -> None:
    os.chown(page, 65534, 65534)
    assert not GuestProcesses(page).kill((child.pid,))
    assert child.poll() is None


@pytest.mark.parametrize("pid", [-1, 0, 1, 4_000_000])
def test_names_that_are_no_process_of_the_guest_s_end_nobody(page: Path, pid: int) -> None:
    assert not GuestProcesses(page).kill((pid,))


def test_without_a_page_there_is_no_guest(child: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    assert not GuestProcesses(tmp_path / "guest").kill((child.pid,))
