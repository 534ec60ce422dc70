"""What bounds a guest step that is already running. The slack law bounds which steps run.

Chosen by capability, reported in the grant as `blocking_ratio` and undone on exit:

    idle    Linux: the guest's processes in the idle scheduling class; production preempts them
    none    nothing; the whole of a running step delays production
"""

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harvester.contracts.errors import Unsupported


class IsolationBackend(StrEnum):
    IDLE = "idle"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Isolation:
    backend: IsolationBackend
    blocking_ratio: float
    """Share of a running guest step that can delay production, 0 to 1."""


# A waking normal task preempts the idle class at once, but vLLM's processes on one core hand it to
# each other by yielding, and then an idle task that was picked keeps the core until the next tick:
# 4 ms at 250 Hz, about a fifth of a step, and the step's working set has pushed production's out.
IDLE_CLASS = Isolation(IsolationBackend.IDLE, blocking_ratio=0.2)
NO_ISOLATION = Isolation(IsolationBackend.NONE, blocking_ratio=1.0)


def choose(wanted: IsolationBackend | None = None) -> Isolation:
    """The best backend of this machine, or the wanted one.

    Raises Unsupported when the wanted one cannot work here.
    """
    if wanted is IsolationBackend.NONE:
        return NO_ISOLATION
    if hasattr(os, "SCHED_IDLE"):
        return IDLE_CLASS
    if wanted is IsolationBackend.IDLE:
        raise Unsupported("the idle scheduling class needs Linux; choose isolation 'none'")
    return NO_ISOLATION


def apply_to_process(isolation: Isolation, pid: int = 0) -> None:
    """Put a process (0: this one) and every thread of it under the backend.

    Children and threads made later inherit it, so it is called before an engine starts its own.
    """
    if isolation.backend is IsolationBackend.IDLE:
        for thread in _threads(pid):
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def lift_from_process(pid: int) -> None:
    """Back to the normal class, for a reclaim that must not wait behind production."""
    for thread in _threads(pid):
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _threads(pid: int) -> list[int]:
    if pid == 0:
        return [0]
    return sorted(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())
