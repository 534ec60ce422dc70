"""Process identities across pid namespaces: a pid and the start time of its process, since pids are
reused and each namespace counts its own."""

from pathlib import Path

import msgspec

_PARENT_FIELD = 4
_START_FIELD = 22
"""Field of /proc/PID/stat: start time in clock ticks since the machine booted."""


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    start_ticks: int

    def lives(self) -> bool:
        """Whether this very process exists here; a zombie does too."""
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since boot; None if the process is gone or not visible."""
    return _status(pid, _START_FIELD)


def lineage(pid: int) -> tuple[int, ...]:
    """Pids of a process and its ancestors, nearest first, as far as the kernel shows them."""
    line: list[int] = []
    while pid and pid not in line:
        line.append(pid)
        pid = _status(pid, _PARENT_FIELD) or 0
    return tuple(line)


def family(pid: int) -> tuple[int, ...]:
    """Pids of a process and its descendants, ascending, as far as the kernel shows them.

    Raises OSError if the process does not exist, or the kernel does not list children.
    """
    found, unseen = {pid}, [pid]
    while unseen:
        parent = unseen.pop()
        try:
            threads = list(Path(f"/proc/{parent}/task").iterdir())
        except OSError:
            if parent == pid:
                raise
            continue  # The process ended after it was listed.
        for thread in threads:
            try:
                children = {int(word) for word in (thread / "children").read_text().split()}
            except (FileNotFoundError, ProcessLookupError):
                if thread.exists():
                    raise
                continue
            unseen += children - found
            found |= children
    return tuple(sorted(found))


def process_ids(pids: list[int]) -> tuple[ProcessId, ...]:
    """Identities of the pids that exist."""
    found = [(pid, start_ticks(pid)) for pid in pids]
    return tuple(ProcessId(pid=pid, start_ticks=ticks) for pid, ticks in found if ticks is not None)


def _status(pid: int, field: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # The name, in parentheses, may contain any character.
        return int(text.rpartition(")")[2].split()[field - 3])
    except (OSError, ValueError, IndexError):
        return None
