"""Time that processes ran on a core, from the scheduler's own account of each thread.

Read in nanoseconds: `ps` rounds to hundredths of a second.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

Account = Mapping[str, Mapping[int, int]]
"""Nanoseconds on a core, by thread, by the names of its process and itself."""


def used(before: Account, after: Account) -> dict[str, float]:
    """Core seconds in between; a thread that began in between counts from nothing."""
    return {
        name: 1e-9
        * sum(spent - before.get(name, {}).get(thread, 0) for thread, spent in threads.items())
        for name, threads in after.items()
    }


def account(processes: Iterable[psutil.Process], proc: Path = Path("/proc")) -> Account:
    found: dict[str, dict[int, int]] = {}
    for process in processes:
        try:
            for task in (proc / str(process.pid) / "task").iterdir():
                spent_ns = int((task / "schedstat").read_text().split()[0])
                name = f"{process.name()}: {(task / 'comm').read_text().strip()}"
                found.setdefault(name, {})[int(task.name)] = spent_ns
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue  # One that has ended takes no more.
    return found
