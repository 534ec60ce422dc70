"""Scheduling groups as the kernel writes them down, and which of two comes first."""

import os
from pathlib import Path

import pytest

from harvester.platform.scheduling_group import (
    CpuPriority,
    has_lower_priority,
    is_below,
    priorities,
    scheduling_group,
)


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


def test_a_group_out_of_this_namespace_is_not_taken_for_the_root(tmp_path: Path) -> None:
    proc = _process(tmp_path / "proc", cgroup="0::/../serving\n", autogroup="/autogroup-1")
    assert scheduling_group(7, proc=proc, cgroups=tmp_path / "cgroup") == "/../serving"


@pytest.mark.parametrize(
    ("guest", "production", "below"),
    [
        ("/guests", "/autogroup-1", True),
        ("/guests", "/pods/serving", True),
        ("/guests/slot-0", "/pods/serving", True),
        ("/guests", "/guests", False),
        ("/guests", "/guests/inner", False),
        ("/pods/guest", "/pods/serving", True),
        # Idle within its pod alone: the pods share a core evenly.
        ("/pods/guest", "/other", False),
        ("/pods/serving", "/guests", False),
        ("/autogroup-2", "/autogroup-1", False),
        ("/", "/autogroup-1", False),
        # Two idle groups share what others leave evenly.
        ("/guests", "/batch", False),
        ("/guests", "/batch/serving", False),
        ("/pods/guest", "/pods/batch", False),
        # Out of this process's own namespace, where the two part is not to be seen.
        ("/guests", "/../serving", False),
        ("/../guests", "/serving", False),
    ],
)
def test_a_group_has_lower_priority_where_it_is_idle_at_the_fork(
    guest: str, production: str, below: bool, tmp_path: Path
) -> None:
    idle = {"guests": 1, "guests/slot-0": 0, "guests/inner": 0, "pods": 0, "pods/guest": 1}
    idle |= {"batch": 1, "pods/batch": 1, "../guests": 1}
    for path, value in idle.items():
        folder = tmp_path / "cpu" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.idle").write_text(f"{value}\n")
    assert has_lower_priority(guest, production, cgroups=tmp_path) is below


def test_each_thread_has_a_priority_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = _process(tmp_path, cgroup="1:cpu:/pod\n0::/\n", autogroup="/autogroup-1")
    for thread, group in ((7, "/pod"), (8, "/pod"), (9, "/")):
        (proc / f"7/task/{thread}").mkdir(parents=True)
        (proc / f"7/task/{thread}/cgroup").write_text(f"1:cpu:{group}\n0::/\n")
    # One that ended after it was listed.
    (proc / "7/task/10").mkdir()
    monkeypatch.setattr(os, "sched_getscheduler", lambda t: os.SCHED_IDLE if t == 8 else 0)

    found = priorities(7, proc=proc)

    assert found == {
        CpuPriority("/pod", False),
        CpuPriority("/pod", True),
        CpuPriority("/autogroup-1", False),
    }


def test_a_process_that_is_not_shown_has_no_priority(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        priorities(7, proc=tmp_path)


@pytest.mark.parametrize(
    ("guest", "production", "below"),
    [
        (CpuPriority("/a", True), CpuPriority("/a", False), True),
        (CpuPriority("/a", False), CpuPriority("/a", False), False),
        (CpuPriority("/a", True), CpuPriority("/a", True), False),
        (CpuPriority("/a", True), CpuPriority("/b", False), False),
    ],
)
def test_the_idle_class_counts_within_one_group(
    guest: CpuPriority, production: CpuPriority, below: bool, tmp_path: Path
) -> None:
    assert is_below(guest, production, cgroups=tmp_path) is below
