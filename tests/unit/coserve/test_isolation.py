"""Scheduling groups as the kernel writes them down, and what the idle class is worth."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coserve import isolation
from coserve.isolation import IDLE_CLASS, NO_ISOLATION, IsolationBackend, scheduling_group
from harvester.contracts.errors import Unsupported


def _process(
    proc: Path, *, cgroup: str, autogroup: str | None = None, enabled: bool = True
) -> Path:
    (proc / "7").mkdir(parents=True)
    (proc / "7/cgroup").write_text(cgroup)
    if autogroup is not None:
        (proc / "7/autogroup").write_text(f"{autogroup} nice 0\n" if autogroup else "")
    (proc / "sys/kernel").mkdir(parents=True)
    (proc / "sys/kernel/sched_autogroup_enabled").write_text(f"{int(enabled)}\n")
    return proc


def test_without_a_control_group_each_session_is_a_group(tmp_path: Path) -> None:
    proc = _process(tmp_path, cgroup="1:cpu:/\n0::/\n", autogroup="/autogroup-12")
    assert scheduling_group(7, proc=proc) == "/autogroup-12"


def test_without_autogroups_all_are_in_the_root_group(tmp_path: Path) -> None:
    proc = _process(tmp_path, cgroup="0::/\n", autogroup="/autogroup-12", enabled=False)
    assert scheduling_group(7, proc=proc, cgroups=tmp_path) == "/"


def test_a_process_outside_every_autogroup_is_in_the_root_group(tmp_path: Path) -> None:
    proc = _process(tmp_path, cgroup="1:cpu:/\n0::/\n", autogroup="")
    assert scheduling_group(7, proc=proc) == "/"


def test_a_cpu_control_group_of_the_old_hierarchy_comes_before_the_session(tmp_path: Path) -> None:
    proc = _process(tmp_path, cgroup="3:cpu,cpuacct:/pod/a\n0::/\n", autogroup="/autogroup-1")
    assert scheduling_group(7, proc=proc) == "/pod/a"


def test_the_unified_hierarchy_counts_where_it_has_a_cpu_weight(tmp_path: Path) -> None:
    proc = _process(tmp_path / "proc", cgroup="0::/pod/a/leaf\n", autogroup="/autogroup-1")
    weighed = tmp_path / "cgroup/pod/a"
    (weighed / "leaf").mkdir(parents=True)
    (weighed / "cpu.weight").write_text("100\n")
    assert scheduling_group(7, proc=proc, cgroups=tmp_path / "cgroup") == "/pod/a"
    (weighed / "cpu.weight").unlink()
    assert scheduling_group(7, proc=proc, cgroups=tmp_path / "cgroup") == "/autogroup-1"


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid


def test_the_idle_class_is_refused_where_it_would_do_nothing(
    sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.getpid()
    isolation.check_beside(IDLE_CLASS, guest=sleeper, production=mine)
    groups = {sleeper: "/autogroup-2", mine: "/autogroup-1"}
    monkeypatch.setattr(isolation, "scheduling_group", groups.__getitem__)
    with pytest.raises(Unsupported, match=r"autogroup-2.*CPUWeight=idle"):
        isolation.check_beside(IDLE_CLASS, guest=sleeper, production=mine)
    isolation.check_beside(NO_ISOLATION, guest=sleeper, production=mine)


def test_the_idle_class_is_put_on_and_taken_off(sleeper: int) -> None:
    isolation.apply_to_process(isolation.choose(IsolationBackend.IDLE), sleeper)
    assert os.sched_getscheduler(sleeper) == os.SCHED_IDLE
    isolation.lift_from_process(sleeper)
    assert os.sched_getscheduler(sleeper) == os.SCHED_OTHER
