"""An exclusive lock on a file, which the kernel releases when all its holders have ended."""

import fcntl
import os
import weakref
from pathlib import Path

from harvester.contracts.errors import ConfigError
from harvester.platform.scheduling_group import PROC

_OWN: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


class FileLock:
    """Opens the file, not yet locked. Raises OSError. Processes that inherit the descriptor hold
    the lock too, except for a lock that is this process's `own`: forked children close it.
    """

    def __init__(self, path: Path, *, mode: int = 0o666, own: bool = False) -> None:
        self.descriptor = -1
        self._owner = os.getpid() if own else 0
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.descriptor = os.open(path, flags, mode)
        if own:
            _OWN.add(self)

    def take(self) -> bool:
        """Whether it is held now; never waits."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def sign(self) -> None:
        """Name this process as the holder."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, b"%d\n" % os.getpid(), 0)

    def holder(self) -> str:
        """Pid of the process that signed it last; "?" without one."""
        return os.pread(self.descriptor, 32, 0).decode(errors="replace").strip() or "?"

    def release(self) -> None:
        """Unlock, for children that inherited the descriptor too."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close this process's descriptor; the lock holds while another process has it, unless it
        is this process's own."""
        if self.descriptor >= 0:
            if self._owner == os.getpid():
                self.release()
            os.close(self.descriptor)
            self.descriptor = -1

    __del__ = close


def _close_in_child() -> None:
    for lock in (*_OWN,):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


def lock_holder(path: Path) -> int | None:
    """Pid of a process that took the lock on a file, as the kernel shows it to every user; None
    without one. The process may have ended and left the lock to its children."""
    try:
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        lines = [line.split() for line in (PROC / "locks").read_text().splitlines()]
    except OSError:
        return None
    found = (int(line[4]) for line in lines if line[1:2] == ["FLOCK"] and line[5] == device)
    return next((pid for pid in found if pid > 0), None)


def locked(path: Path, *, taken: str) -> FileLock:
    """This process's own lock, held. Raises OSError, and ConfigError with `taken` if another
    process holds it."""
    lock = FileLock(path, own=True)
    try:
        if lock.take():
            return lock
    except BaseException:
        lock.close()
        raise
    lock.close()
    raise ConfigError(taken)
