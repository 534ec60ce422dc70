"""The groups among which the kernel shares out a core before it looks at classes and priorities.

Groups are control groups with a cpu controller, and, where a process is in none, one group for each
session (autogroup). The class of a thread ranks it within its own group only.
"""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def scheduling_group(pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> str:
    """Name of the group within which the kernel ranks a process, e.g. `/system.slice/a.service`."""
    own = control_group(pid, proc=proc, cgroups=cgroups)
    if own != "/":
        return own
    enabled = proc / "sys/kernel/sched_autogroup_enabled"
    if not enabled.exists() or enabled.read_text().strip() != "1":
        return own
    autogroup = proc / str(pid) / "autogroup"
    # Empty for a process whose session never got a group of its own, such as init's.
    words = autogroup.read_text().split() if autogroup.exists() else []
    return words[0] if words else own


def control_group(pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> str:
    """The control group that has a process's weight; `/` where none but the machine's root."""
    lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    paths = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    own = next((path for names, path in paths.items() if "cpu" in names.split(",")), None)
    return _with_cpu_controller(paths.get("", "/"), cgroups) if own is None else own


def is_idle(group: str, *, cgroups: Path = CGROUPS) -> bool:
    """Whether it is a control group with `cpu.idle`."""
    for root in hierarchies(cgroups):
        file = root / group.lstrip("/") / "cpu.idle"
        if group != "/" and file.exists():
            return file.read_text().strip() == "1"
    return False


def is_under_idle(group: str, *, cgroups: Path = CGROUPS) -> bool:
    """Whether it is one, or in one."""
    return any(is_idle(str(each), cgroups=cgroups) for each in (Path(group), *Path(group).parents))


def ranks_below(guest: str, production: str, *, cgroups: Path = CGROUPS) -> bool:
    """Whether the first group gets a core only while the second wants none, whatever its classes.

    Two groups are weighed where their ways from the root part, by what each has there.
    """
    shared = os.path.commonpath([guest, production])
    if shared == guest:
        return False
    parted = Path(guest).relative_to(shared).parts[0]
    return is_idle(str(Path(shared) / parted), cgroups=cgroups)


def hierarchies(cgroups: Path = CGROUPS) -> tuple[Path, ...]:
    """Where a cpu controller may be mounted: the unified hierarchy, or one of its own."""
    return (cgroups, cgroups / "cpu", cgroups / "cpu,cpuacct")


def _with_cpu_controller(path: str, cgroups: Path) -> str:
    """The nearest group upwards that the unified hierarchy gives a CPU weight of its own."""
    while path != "/" and not (cgroups / path.lstrip("/") / "cpu.weight").exists():
        path = str(Path(path).parent)
    return path
