"""The lock on a node's `state_dir`: two agents there would undo each other's stops, leases and
records, whatever pages each of them has."""

from contextlib import suppress
from pathlib import Path

from harvester.contracts.errors import ConfigError, Exhausted, NotYet
from harvester.contracts.journal import DISK_FAULTS
from harvester.platform.file_lock import FileLock

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
