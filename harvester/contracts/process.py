"""Which process is meant, when another process names it: a number is used again, and counts anew in
every pid namespace, so its start belongs to it."""

from pathlib import Path

import msgspec

_PARENT_FIELD = 4
_START_FIELD = 22
"""Of /proc/PID/stat; clock ticks since the machine started."""


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int | None:
    """None where there is no such process, or none that this one may see."""
    return _status(pid, _START_FIELD)


def lineage(pid: int) -> tuple[int, ...]:
    """A process and those that it descends from, nearest first, as far as the kernel shows them."""
    line: list[int] = []
    while pid and pid not in line:
        line.append(pid)
        pid = _status(pid, _PARENT_FIELD) or 0
    return tuple(line)


def family(pid: int) -> tuple[int, ...]:
    """A process and all that descend from it, as far as the kernel shows them; ordered by pid.

    Raises OSError where the process is not there, or the kernel does not tell children.
    """
    found, unseen = {pid}, [pid]
    while unseen:
        parent = unseen.pop()
        try:
            threads = list(Path(f"/proc/{parent}/task").iterdir())
        except OSError:
            if parent == pid:
                raise
            continue  # It ended since its parent was asked.
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
    """Of those that there are."""
    found = [(pid, start_ticks(pid)) for pid in pids]
    return tuple(ProcessId(pid=pid, start_ticks=ticks) for pid, ticks in found if ticks is not None)


def _status(pid: int, field: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # The name, in parentheses, may contain anything.
        return int(text.rpartition(")")[2].split()[field - 3])
    except (OSError, ValueError, IndexError):
        return None
