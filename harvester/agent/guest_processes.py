"""Acts on a guest's processes, which the guest itself names: lifts them, or ends them.

A page is written by its guest, so a name in it is believed only for processes of the page's own
owner: whatever a guest makes the agent do, its user could have done. Where the agent sees no such
process (in another pod, say), nothing happens and the caller is told.
"""

import logging
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_log = logging.getLogger(__name__)


class GuestProcesses:
    def __init__(self, page: Path) -> None:
        """`page` is the guest's page; its owner is the guest's user."""
        self._page = page
        self._settled: dict[int, tuple[int, int]] = {}
        """Thread -> (scheduling policy, priority) before it was lifted."""

    def lift(self, processes: Iterable[int]) -> bool:
        """Into the normal scheduling class. False where any could not be."""
        done = True
        self._settled.clear()
        for pid in self._own(processes):
            for thread in _threads(pid):
                try:
                    policy = os.sched_getscheduler(thread)
                    if policy != os.SCHED_IDLE:
                        continue
                    before = (policy, os.sched_getparam(thread).sched_priority)
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                except OSError as error:
                    _log.warning("guest thread %s is not lifted: %s", thread, error.strerror)
                    done = False
                else:
                    self._settled[thread] = before
        return done

    def settle(self, processes: Iterable[int]) -> None:
        """Back to where they were before they were lifted."""
        threads = {thread for pid in self._own(processes) for thread in _threads(pid)}
        for thread, (policy, priority) in self._settled.items():
            if thread not in threads:
                continue
            try:
                os.sched_setscheduler(thread, policy, os.sched_param(priority))
            except OSError:
                continue
        self._settled.clear()

    def kill(self, processes: Iterable[int]) -> bool:
        """False where none could be."""
        killed = False
        self._settled.clear()
        for pid in self._own(processes):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError as error:
                _log.error("guest process %s lives on: %s", pid, error.strerror)
            else:
                killed = True
        return killed

    def _own(self, processes: Iterable[int]) -> list[int]:
        try:
            owner = self._page.lstat().st_uid
        except OSError:
            return []
        return [pid for pid in processes if pid > 1 and _owner(pid) == owner]


def _owner(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
