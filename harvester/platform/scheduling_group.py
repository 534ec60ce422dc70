"""The groups among which the kernel shares out a core before it looks at classes and priorities.

Groups are control groups with a cpu controller, and, where a process is in none, one group for each
session (autogroup). The class of a thread ranks it within its own group only.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Rank:
    """What the kernel ranks a thread by: its group among groups, its class within the group."""

    group: str
    idle_class: bool

    def __str__(self) -> str:
        return f"{self.group} (idle class)" if self.idle_class else self.group


def ranks(pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> frozenset[Rank]:
    """Distinct ranks of a process's threads, each of which may be in a group and class of its own.

    Raises OSError where the process is gone or not shown to this one.
    """
    found = set()
    session = _session(pid, proc)
    for thread in sorted(int(entry.name) for entry in (proc / str(pid) / "task").iterdir()):
        try:
            said = (proc / str(pid) / "task" / str(thread) / "cgroup").read_text()
            idle_class = os.sched_getscheduler(thread) == os.SCHED_IDLE
        except (FileNotFoundError, ProcessLookupError):
            continue  # It ended since it was listed.
        own = _with_weight(said, cgroups)
        found.add(Rank(own if own != "/" else session or own, idle_class))
    if not found:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), str(proc / str(pid)))
    return frozenset(found)


def scheduling_group(pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> str:
    """Name of the group within which the kernel ranks a process, e.g. `/system.slice/a.service`."""
    own = control_group(pid, proc=proc, cgroups=cgroups)
    return own if own != "/" else _session(pid, proc) or own


def _session(pid: int, proc: Path) -> str | None:
    """Name of the session's group; None where sessions have none."""
    enabled = proc / "sys/kernel/sched_autogroup_enabled"
    if not enabled.exists() or enabled.read_text().strip() != "1":
        return None
    autogroup = proc / str(pid) / "autogroup"
    # Empty for a process whose session never got a group of its own, such as init's.
    words = autogroup.read_text().split() if autogroup.exists() else []
    return words[0] if words else None


def control_group(pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> str:
    """The control group that has a process's weight; `/` where none but the machine's root."""
    return _with_weight((proc / str(pid) / "cgroup").read_text(), cgroups)


def _with_weight(said: str, cgroups: Path) -> str:
    lines = said.splitlines()
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

    Two groups are weighed where their ways from the root part, by what each has there; two that
    are idle there share the core. A path out of this process's own namespace (`/../pod`) does not
    say where they part.
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


def is_below(guest: Rank, production: Rank, *, cgroups: Path = CGROUPS) -> bool:
    """Whether a waking thread of the second rank preempts a running one of the first at once."""
    if guest.group == production.group:
        return guest.idle_class and not production.idle_class
    return ranks_below(guest.group, production.group, cgroups=cgroups)


def hierarchies(cgroups: Path = CGROUPS) -> tuple[Path, ...]:
    """Where a cpu controller may be mounted: the unified hierarchy, or one of its own."""
    return (cgroups, cgroups / "cpu", cgroups / "cpu,cpuacct")


def _with_cpu_controller(path: str, cgroups: Path) -> str:
    """The nearest group upwards that the unified hierarchy gives a CPU weight of its own."""
    if ".." in Path(path).parts:
        return path  # Out of this process's namespace: its files are not here.
    while path != "/" and not (cgroups / path.lstrip("/") / "cpu.weight").exists():
        path = str(Path(path).parent)
    return path
