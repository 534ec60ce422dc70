"""Control groups for guests: idle as a whole, so that all other work on the machine goes first.

A thread of the idle class in production's own group still costs production: the kernel gives it
its three thousandths in ticks of milliseconds, after which production's threads are out of turn
among themselves for a second. With the guest in another group, they are ranked as if it were away.

A guest enters only from the root group: in a service or a container the control group is its
operator's, who may make it or a parent idle (systemd: `CPUWeight=idle` of a slice). Each guest has
a group of its own, so that lifting one lifts no other.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

from harvester.contracts.errors import Unsupported
from harvester.platform.scheduling_group import (
    CGROUPS,
    PROC,
    control_group,
    hierarchies,
    is_under_idle,
    scheduling_group,
)

_PREFIX = "rosemux-guest-"
_PROBE = "rosemux-probe-"
_MEMBERS = "cgroup.procs"
_IDLE = "cpu.idle"
_TRIES = 3
# Ten times the weight of any other group. A group that was idle stands behind the others in the
# kernel's virtual time, and with an even weight first ran a tenth of a second after it was lifted.
_LIFTED = {"cpu.weight": "1000", "cpu.shares": "10240"}


class IdleGroups:
    """Guests' groups. Holds only paths, so any process may use it."""

    def __init__(
        self, *, proc: Path = PROC, cgroups: Path = CGROUPS, prefix: str = _PREFIX
    ) -> None:
        """`prefix` begins the names of the groups; groups with another one are an operator's."""
        self._prefix = prefix
        self._proc = proc
        self._cgroups = cgroups

    def check(self, pid: int) -> None:
        """Raises Unsupported with the reason if a process cannot be in an idle group here."""
        try:
            if self._is_given(pid):
                return
            own = control_group(pid, proc=self._proc, cgroups=self._cgroups)
        except OSError as error:
            raise Unsupported(f"process {pid} has no control groups: {error}") from error
        if own != "/":
            raise Unsupported(
                f"control group {own} is not idle, and not ours to change: give it, or one above "
                "it, cpu.idle=1 (systemd: CPUWeight=idle)"
            )
        self._try()

    def enter(self, pid: int, *, guest: int) -> None:
        """Move a process with all its threads; later children start there too. Raises Unsupported.
        `guest` is the first process of the guest, which its group is named after.
        """
        self.check(pid)
        if self._is_given(pid):
            return
        self.clear()  # Guests that were killed left theirs.
        group = self._writable_root() / f"{self._prefix}{guest}"
        failure: OSError | None = None
        for _ in range(_TRIES):
            try:
                group.mkdir(exist_ok=True)
                _make_idle(group)
                (group / _MEMBERS).write_text(f"{pid}\n")
                return
            except OSError as error:
                failure = error
                # Another guest's `clear` may have removed the still empty group between those
                # lines.
                if error.errno not in {errno.ENOENT, errno.ENODEV}:
                    break
        raise Unsupported(f"{group}: {failure}") from failure

    def leave(self, pid: int) -> None:
        """Move a process from its guest group to the parent, if it is in one. Raises OSError."""
        group = self._of(pid)
        if group is not None:
            (group.parent / _MEMBERS).write_text(f"{pid}\n")

    def lift(self, pid: int) -> bool:
        """Give the group of this process's guest ten times the weight of others, for a while.

        Returns False if the process is in no guest group. Raises OSError.
        """
        group = self._set(pid, idle=False)
        if group is None:
            return False
        for name, weight in _LIFTED.items():
            # The group is no longer idle and must count as lifted to be settled again.
            with suppress(OSError):
                if (group / name).exists():
                    (group / name).write_text(f"{weight}\n")
        return True

    def settle(self, pid: int) -> bool:
        """Make the group idle again; False if the process is in no guest group. Raises OSError."""
        return self._set(pid, idle=True) is not None

    def clear(self) -> tuple[Path, ...]:
        """Remove empty guest groups; returns the removed ones."""
        gone = []
        for group in self.all():
            with suppress(OSError):
                group.rmdir()
                gone.append(group)
        return tuple(gone)

    def all(self) -> tuple[Path, ...]:
        """Guest groups, and groups that a killed probe left."""
        roots = {root.resolve() for root in hierarchies(self._cgroups)}
        found = (root.glob(f"{name}*") for root in roots for name in (self._prefix, _PROBE))
        return tuple(sorted(group for groups in found for group in groups))

    def commands(self) -> tuple[str, ...]:
        """Shell commands that put a new guest into its group; none where it is idle already."""
        if self._is_given(os.getpid()):
            return ()
        group = self._writable_root() / f"{self._prefix}$$"
        return (f"mkdir -p {group}", f"echo 1 > {group / _IDLE}", f"echo $$ > {group / _MEMBERS}")

    def _set(self, pid: int, *, idle: bool) -> Path | None:
        group = self._of(pid)
        if group is not None:
            (group / _IDLE).write_text(f"{int(idle)}\n")
        return group

    def _of(self, pid: int) -> Path | None:
        try:
            name = control_group(pid, proc=self._proc, cgroups=self._cgroups).lstrip("/")
        except OSError:
            return None
        if not name.startswith(self._prefix):
            return None
        found = (root / name for root in hierarchies(self._cgroups) if (root / name).is_dir())
        return next(found, None)

    def _is_given(self, pid: int) -> bool:
        group = scheduling_group(pid, proc=self._proc, cgroups=self._cgroups)
        return is_under_idle(group, cgroups=self._cgroups)

    def _try(self) -> None:
        """Make and remove an idle group, since only the attempt shows whether the kernel and the
        container allow it. Raises Unsupported.
        """
        group = self._writable_root() / f"{_PROBE}{os.getpid()}"
        try:
            group.mkdir(exist_ok=True)
            _make_idle(group)
        except OSError as error:
            raise Unsupported(f"{group}: {error.strerror}") from error
        finally:
            with suppress(OSError):
                group.rmdir()

    def _writable_root(self) -> Path:
        """Writable root of the machine's cpu controller. Raises Unsupported."""
        for root in hierarchies(self._cgroups):
            if not _has_cpu_controller(root):
                continue
            if not os.access(root / _MEMBERS, os.W_OK):
                raise Unsupported(f"no control group can be made in {root}: that takes root")
            return root
        raise Unsupported("no cpu controller here has groups that could be idle")


def _make_idle(group: Path) -> None:
    file = group / _IDLE
    if not file.exists():
        raise Unsupported("the kernel knows no cpu.idle: use Linux 5.15 or later")
    file.write_text("1\n")


def _has_cpu_controller(root: Path) -> bool:
    unified = root / "cgroup.subtree_control"
    if unified.exists():
        return "cpu" in unified.read_text().split()
    return (root / "cpu.shares").exists() or (root / "cpu.cfs_quota_us").exists()
