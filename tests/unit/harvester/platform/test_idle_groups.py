"""The control group that guests enter: real where this kernel lets us, and what others refuse."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester.contracts.errors import Unsupported
from harvester.platform.idle_groups import IdleGroups
from harvester.platform.scheduling_group import (
    has_lower_priority,
    hierarchies,
    is_idle,
    scheduling_group,
)


def _possible() -> bool:
    try:
        IdleGroups().check(os.getpid())
    except Unsupported:
        return False
    return scheduling_group(os.getpid()) != "/"


here = pytest.mark.skipif(not _possible(), reason="no idle control group can be made here")


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid


@here
def test_a_process_in_the_idle_group_ranks_below_all_others_until_it_leaves(sleeper: int) -> None:
    groups, mine = IdleGroups(), scheduling_group(os.getpid())
    before = scheduling_group(sleeper)
    groups.enter(sleeper, guest=sleeper)
    groups.enter(sleeper, guest=sleeper)
    inside = scheduling_group(sleeper)
    assert has_lower_priority(inside, mine)
    groups.leave(sleeper)
    groups.leave(sleeper)
    assert scheduling_group(sleeper) == before


@here
def test_one_guest_is_lifted_and_settled_and_no_other(sleeper: int) -> None:
    groups, mine = IdleGroups(), scheduling_group(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for pid in (sleeper, other.pid):
            groups.enter(pid, guest=pid)
        ranks = [scheduling_group(pid) for pid in (sleeper, other.pid)]
        assert groups.lift(sleeper)
        assert [has_lower_priority(rank, mine) for rank in ranks] == [False, True]
        assert groups.settle(sleeper)
        assert [has_lower_priority(rank, mine) for rank in ranks] == [True, True]
        for pid in (sleeper, other.pid):
            groups.leave(pid)
    groups.clear()
    assert not groups.lift(sleeper), "it is in no group of ours any more"


@here
def test_a_lifted_guest_outweighs_a_group_that_is_not(sleeper: int) -> None:
    groups = IdleGroups()
    groups.enter(sleeper, guest=sleeper)
    assert _weight(sleeper) < 0.1
    groups.lift(sleeper)
    assert _weight(sleeper) == 10.0
    groups.settle(sleeper)
    assert _weight(sleeper) < 0.1
    groups.leave(sleeper)
    groups.clear()


def _weight(pid: int) -> float:
    """CPU weight of a process's group, over the default weight."""
    group = scheduling_group(pid).lstrip("/")
    for root in hierarchies():
        for name, usual in (("cpu.weight", 100), ("cpu.shares", 1024)):
            if (root / group / name).exists():
                return int((root / group / name).read_text()) / usual
    raise AssertionError(f"{group} has no weight")


@here
def test_processes_of_one_guest_share_a_group_which_goes_with_the_last(sleeper: int) -> None:
    groups = IdleGroups()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        for pid in (sleeper, worker.pid):
            groups.enter(pid, guest=sleeper)
        folder = scheduling_group(sleeper)
        assert scheduling_group(worker.pid) == folder
        groups.leave(worker.pid)
    groups.clear()
    assert is_idle(folder), "somebody is in it"
    groups.leave(sleeper)
    groups.clear()
    assert not is_idle(folder)


@here
def test_a_killed_guest_s_group_goes_when_the_next_enters(sleeper: int) -> None:
    groups = IdleGroups()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as killed:
        groups.enter(killed.pid, guest=killed.pid)
        left = scheduling_group(killed.pid)
        killed.kill()
    assert is_idle(left)
    groups.enter(sleeper, guest=sleeper)
    assert not is_idle(left)
    groups.leave(sleeper)
    groups.clear()


@here
def test_a_shell_that_runs_its_commands_is_in_it() -> None:
    script = "\n".join((*IdleGroups().commands(), "cat /proc/self/cgroup"))
    seen = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, check=True).stdout
    IdleGroups().clear()
    assert "rosemux-guest-" in seen


def _machine(folder: Path, *, own: str, controllers: str = "cpu memory") -> IdleGroups:
    """A unified hierarchy, in which process 7 is in the group `own`."""
    (folder / "proc/7").mkdir(parents=True)
    (folder / "proc/7/cgroup").write_text(f"0::{own}\n")
    cgroups = folder / "cgroup"
    (cgroups / own.lstrip("/")).mkdir(parents=True)
    (cgroups / "cgroup.subtree_control").write_text(controllers)
    (cgroups / "cgroup.procs").touch()
    if own != "/":
        (cgroups / own.lstrip("/") / "cpu.weight").write_text("100\n")
        (cgroups / own.lstrip("/") / "cpu.idle").write_text("0\n")
    return IdleGroups(proc=folder / "proc", cgroups=cgroups)


def test_a_guest_lifted_without_a_new_weight_can_be_settled(tmp_path: Path) -> None:
    groups = _machine(tmp_path, own="/rosemux-guest-7")
    group = tmp_path / "cgroup/rosemux-guest-7"
    (group / "cpu.weight").unlink()
    (group / "cpu.weight").mkdir()  # A directory in the file's place: even root cannot write it.
    (group / "cpu.idle").write_text("1\n")
    assert groups.lift(7)
    assert (group / "cpu.idle").read_text() == "0\n"
    assert groups.settle(7)
    assert (group / "cpu.idle").read_text() == "1\n"


def test_a_service_keeps_the_group_it_was_given(tmp_path: Path) -> None:
    group = _machine(tmp_path, own="/system.slice/guest.service")
    with pytest.raises(Unsupported, match=r"/system.slice/guest.service .*CPUWeight=idle"):
        group.enter(7, guest=7)


@pytest.mark.parametrize("idle", ["guests.slice", "guests.slice/guest.service"])
def test_a_service_in_an_idle_group_has_nothing_to_enter(idle: str, tmp_path: Path) -> None:
    group = _machine(tmp_path, own="/guests.slice/guest.service")
    (tmp_path / "cgroup" / idle / "cpu.idle").write_text("1\n")
    group.enter(7, guest=7)
    assert not list((tmp_path / "cgroup").glob("rosemux-*"))


def test_a_kernel_without_control_groups_refuses(tmp_path: Path) -> None:
    groups = IdleGroups(proc=tmp_path / "proc", cgroups=tmp_path / "cgroup")
    with pytest.raises(Unsupported, match="process 7 has no control groups"):
        groups.check(7)


def test_without_a_cpu_controller_there_is_no_such_group(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no cpu controller"):
        _machine(tmp_path, own="/", controllers="memory pids").check(7)


def test_a_kernel_without_idle_groups_says_so_and_keeps_none(tmp_path: Path) -> None:
    # A plain directory has no files of the kernel.
    group = _machine(tmp_path, own="/")
    with pytest.raises(Unsupported, match=r"5\.15"):
        group.check(7)
    assert not list((tmp_path / "cgroup").glob("rosemux-*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_without_leave_to_write_the_refusal_says_what_it_takes(tmp_path: Path) -> None:
    group = _machine(tmp_path, own="/")
    (tmp_path / "cgroup/cgroup.procs").chmod(0o444)
    with pytest.raises(Unsupported, match="takes root"):
        group.check(7)
