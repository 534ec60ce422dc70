"""The lock on a node's `state_dir`: two agents there would undo each other's stops, leases and
records, whatever pages each of them has."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from harvester.contracts.errors import ConfigError, Exhausted, NotYet
from harvester.contracts.journal import DISK_FAULTS
from harvester.platform.file_lock import FileLock

_log = logging.getLogger(__name__)

STATE_LOCK = ".lock"


def lock_state(state_dir: Path) -> FileLock:
    """Never waits. Raises ConfigError, NotYet while another agent has it, and Exhausted where the
    disk takes no file now."""
    path = state_dir / STATE_LOCK
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        # Its user's alone: a process that may open it may hold it.
        lock = FileLock(path, mode=0o600)
        if lock.take():
            with suppress(OSError):  # A full disk takes no name.
                lock.sign()
            return lock
    except OSError as error:
        kind = Exhausted if error.errno in DISK_FAULTS else ConfigError
        raise kind(
            f"cannot lock state_dir at {path}: {error.strerror}; it must be this user's"
        ) from error
    raise NotYet(
        f"state_dir {state_dir} is in use by process {lock.holder()}: stop the agent that runs "
        "with it, or give each agent a state_dir of its own"
    )


class StateLock:
    """The lock of a running agent. Raises as `lock_state`."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._lock = lock_state(state_dir)
        self._fault = ""
        self.lost = False
        """Whether another agent has it, so that this one must write nothing there any more."""

    def keep(self) -> None:
        """Take the lock anew where `state_dir` was emptied, moved or mounted over. Raises NotYet
        where another agent was faster. A disk that takes no file is logged."""
        with suppress(OSError):
            there = (self._state_dir / STATE_LOCK).stat()
            if os.path.samestat(there, os.fstat(self._lock.descriptor)):
                return
        fault = ""
        try:
            taken = lock_state(self._state_dir)
        except NotYet:
            self.lost = True
            raise
        except (ConfigError, Exhausted) as error:
            fault = str(error)
            if fault != self._fault:
                _log.error("%s", fault)
        else:
            self._lock.close()
            self._lock = taken
            _log.warning("the lock in %s was gone and is taken anew", self._state_dir)
        self._fault = fault

    def close(self) -> None:
        self._lock.close()
