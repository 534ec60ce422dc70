"""The groups among which the kernel divides a core before it compares classes and priorities.

Groups are control groups with a cpu controller; processes outside them are grouped by session
(autogroup). The class of a thread ranks it within its own group only.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class CpuPriority:
    """Priority of a thread for the kernel: its group among groups, its class within it."""

    group: str
    idle_class: bool

    def __str__(self) -> str:
        return f"{self.group} (idle class)" if self.idle_class else self.group


def priorities(pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> frozenset[CpuPriority]:
    """Distinct priorities of a process's threads; each has a group and class of its own.

    Raises OSError if the process has ended or is not visible to this one.
    """
    found = set()
    session = _session(pid, proc)
    for thread in sorted(int(entry.name) for entry in (proc / str(pid) / "task").iterdir()):
        try:
            memberships = (proc / str(pid) / "task" / str(thread) / "cgroup").read_text()
            idle_class = os.sched_getscheduler(thread) == os.SCHED_IDLE
        except (FileNotFoundError, ProcessLookupError):
            continue  # The thread ended after it was listed.
        own = _with_weight(memberships, cgroups)
        found.add(CpuPriority(own if own != "/" else session or own, idle_class))
    if not found:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), str(proc / str(pid)))
    return frozenset(found)


def scheduling_group(pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> str:
    """Name of the group within which the kernel ranks a process, e.g. `/system.slice/a.service`."""
    own = control_group(pid, proc=proc, cgroups=cgroups)
    return own if own != "/" else _session(pid, proc) or own


def _session(pid: int, proc: Path) -> str | None:
    """Name of the session's group; None if autogroup is off or the session has no group."""
    enabled = proc / "sys/kernel/sched_autogroup_enabled"
    if not enabled.exists() or enabled.read_text().strip() != "1":
        return None
    autogroup = proc / str(pid) / "autogroup"
    # Empty for a process whose session has no group of its own, for example init.
    words = autogroup.read_text().split() if autogroup.exists() else []
    return words[0] if words else None


def control_group(pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> str:
    """The control group that has a process's CPU weight; `/` if only the machine's root has one."""
    return _with_weight((proc / str(pid) / "cgroup").read_text(), cgroups)


def _with_weight(memberships: str, cgroups: Path) -> str:
    lines = memberships.splitlines()
    paths = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    own = next((path for names, path in paths.items() if "cpu" in names.split(",")), None)
    return _with_cpu_controller(paths.get("", "/"), cgroups) if own is None else own


def is_idle(group: str, *, cgroups: Path = CGROUPS) -> bool:
    """Whether the group is a control group with `cpu.idle` set."""
    for root in hierarchies(cgroups):
        file = root / group.lstrip("/") / "cpu.idle"
        if group != "/" and file.exists():
            return file.read_text().strip() == "1"
    return False


def is_under_idle(group: str, *, cgroups: Path = CGROUPS) -> bool:
    """Whether the group or one of its ancestors is idle."""
    return any(is_idle(str(each), cgroups=cgroups) for each in (Path(group), *Path(group).parents))


def has_lower_priority(guest: str, production: str, *, cgroups: Path = CGROUPS) -> bool:
    """Whether the first group gets a core only while the second wants none, whatever its classes.

    The kernel compares two groups below their closest common ancestor; two that are idle there
    share the core. A path outside this process's namespace (`/../pod`) hides that ancestor, so the
    answer is False.
    """
    if ".." in Path(guest).parts or ".." in Path(production).parts:
        return False
    shared = Path(os.path.commonpath([guest, production]))
    if str(shared) == guest:
        return False
    parted = [
        str(shared / Path(one).relative_to(shared).parts[0])
        for one in (guest, production)
        if one != str(shared)
    ]
    idle = [is_idle(one, cgroups=cgroups) for one in parted]
    return idle[0] and not any(idle[1:])


def is_below(guest: CpuPriority, production: CpuPriority, *, cgroups: Path = CGROUPS) -> bool:
    """Whether a waking thread of production preempts a running one of the guest at once."""
    if guest.group == production.group:
        return guest.idle_class and not production.idle_class
    return has_lower_priority(guest.group, production.group, cgroups=cgroups)


def hierarchies(cgroups: Path = CGROUPS) -> tuple[Path, ...]:
    """Possible mount points of a cpu controller: the unified hierarchy, or a separate one."""
    return (cgroups, cgroups / "cpu", cgroups / "cpu,cpuacct")


def _with_cpu_controller(path: str, cgroups: Path) -> str:
    """The nearest group upwards that the unified hierarchy gives a CPU weight of its own."""
    if ".." in Path(path).parts:
        return path  # Outside this process's namespace: its files are not visible.
    while path != "/" and not (cgroups / path.lstrip("/") / "cpu.weight").exists():
        path = str(Path(path).parent)
    return path
