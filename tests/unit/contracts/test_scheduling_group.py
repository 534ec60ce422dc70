"""Scheduling groups as the kernel writes them down, and which of two comes first."""

from pathlib import Path

import pytest

from harvester.contracts.scheduling_group import ranks_below, scheduling_group


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
    ],
)
def test_a_group_ranks_below_where_it_is_idle_at_the_fork(
    guest: str, production: str, below: bool, tmp_path: Path
) -> None:
    idle = {"guests": 1, "guests/slot-0": 0, "guests/inner": 0, "pods": 0, "pods/guest": 1}
    for path, value in idle.items():
        folder = tmp_path / "cpu" / path
        folder.mkdir(parents=True)
        (folder / "cpu.idle").write_text(f"{value}\n")
    assert ranks_below(guest, production, cgroups=tmp_path) is below
