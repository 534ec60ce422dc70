"""One living writer a page: a file beside the page that the kernel locks for it.

The kernel ends the lock with its process, so that a restart takes the page over at once. The file
has mode 0600, since every process that may open a file may lock it. Locks are on open files
(`F_OFD_SETLK`), and a forked child gives its copy up: a worker that outlives its engine holds none.

    byte 0    exclusive: the writer
    byte 1    shared: processes that were refused, for as long as they want the page
"""

import errno
import fcntl
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from harvester.contracts.errors import ConfigError, Exhausted

_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid."""
_WRITER, _RIVALS = 0, 1
_HOLDER_BYTES = 80
_OPEN_ATTEMPTS = 8
_SHORTAGES = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM))


class PageHeld(ConfigError):  # noqa: N818 - named for the state, not for a fault
    """The page has a living writer in another process."""


def is_same_file(path: Path, opened: os.stat_result, *, least_bytes: int = 0) -> bool:
    """Whether the path names the opened file: not deleted, not recreated, and not cut short."""
    try:
        there = os.lstat(path)
    except OSError:
        return False
    same = (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)
    return same and there.st_size >= least_bytes


class WriterLock:
    """Lock of one page; used by one thread at a time."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self.path = page.with_name(f".{page.name}.lock")
        self.held = False
        self._fd = -1
        _locks.add(self)

    def take(self, *, claim: bool = False) -> None:
        """Raises PageHeld, naming the process that holds it; with `claim` that process sees the
        refusal (`contested`) until this lock is closed or taken. Raises ConfigError where there can
        be no lock, and Exhausted."""
        if self.held:
            return
        self._open()
        if self._set(fcntl.F_WRLCK, _WRITER):
            self.held = True
            self._set(fcntl.F_UNLCK, _RIVALS)
            self._sign()
            return
        holder = os.pread(self._fd, _HOLDER_BYTES, 0).decode(errors="replace").strip()
        if claim:
            self._set(fcntl.F_RDLCK, _RIVALS)
        else:
            self.close()
        raise PageHeld(
            f"page {self._page} is written by process "
            f"{''.join(filter(str.isprintable, holder)) or 'unknown'}, which still runs"
        )

    def contested(self) -> bool:
        """Whether another living process wants to write the page too."""
        if not self.held:
            return False
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _RIVALS, 1, 0)
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def in_place(self) -> bool:
        """Whether the path still names the file that is locked."""
        return self._fd >= 0 and is_same_file(self.path, self._opened)

    def close(self) -> None:
        """Give lock and claim up; they may be taken again."""
        self.held = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def _open(self) -> None:
        for _ in range(_OPEN_ATTEMPTS):
            if self._fd < 0:
                try:
                    self._fd = open_own(self.path, flags=os.O_CREAT, mode=0o600)
                    self._opened = os.fstat(self._fd)
                except OSError as error:
                    raise refusal(self.path, error) from error
            if self.in_place():
                return
            # Deleted meanwhile: the next writer would lock another file.
            self.close()
        raise Exhausted(f"{self.path} is deleted again and again")

    def _set(self, kind: int, byte: int) -> bool:
        try:
            lock_range = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, lock_range)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            raise ConfigError(f"cannot lock {self.path}: {error.strerror}") from error
        return True

    def _sign(self) -> None:
        """Write this process's name for refused writers; a full file system takes none."""
        try:
            name = Path("/proc/self/comm").read_bytes()
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d %s" % (os.getpid(), name), 0)
        except OSError:
            return


def open_own(path: Path, *, flags: int, mode: int) -> int:
    """Open this user's own plain file, and give it exactly `mode`, whatever the umask.

    Raises OSError, and ConfigError for another user's file or one that is not plain.
    """
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags, mode)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise _stranger(path, found.st_uid)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise ConfigError(f"{path} is not a regular file of one name; remove it first")
        os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _stranger(path: Path, owner: int) -> ConfigError:
    return ConfigError(
        f"{path} belongs to another user ({owner}) than this process ({os.geteuid()}); remove it "
        "first"
    )


def refusal(path: Path, error: OSError) -> ConfigError | Exhausted:
    """The error of one that cannot be opened or written: mended by the user, or by time."""
    if error.errno in _SHORTAGES:
        return Exhausted(f"no room for page {path}: {error.strerror}")
    with suppress(OSError):
        if (owner := path.lstat().st_uid) != os.geteuid():
            return _stranger(path, owner)
    return ConfigError(f"cannot write page {path}: {error.strerror}")


_locks: WeakSet[WriterLock] = WeakSet()


def _forget_in_child() -> None:
    for lock in tuple(_locks):
        lock.close()


os.register_at_fork(after_in_child=_forget_in_child)
