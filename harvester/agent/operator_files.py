"""Files by which an operator commands the agent: the node's kill switch, a slot's release.

These files work without the network and while the agent is down, and need the right to write there.
"""

import errno
import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from harvester.contracts.clock import wall_seconds
from harvester.contracts.page.owners import user_name
from harvester.contracts.wire.stops import one_line
from harvester.policy.sample import KillSwitch

_log = logging.getLogger(__name__)

RELEASE_BYTES_MAX = 400
_SWITCH_BYTES = 64
_SHOWN_BYTES = 40
_KILL_WORDS = (KillSwitch.HOLD, KillSwitch.DRAIN)
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
T = TypeVar("T")


class LastRead(Generic[T]):
    """The meaning of a file when it was last read, for as long as it is the same file.

    A lack of file descriptors, which other processes may cause, does not count as an order.
    """

    def __init__(self) -> None:
        self._read: tuple[tuple[int, ...], T] | None = None
        self.fault = ""
        """Why the file could not be read now, for lack of a descriptor."""
        self.unclear = ""
        """Why a kill file drains although it does not say so."""

    def keep(self, status: os.stat_result, value: T) -> T:
        self._read = _version(status), value
        return value

    def value(self, path: Path, error: OSError, *, otherwise: T) -> T:
        """The kept value where no descriptor was free; else this one, and a fault of the agent's
        for a file that was not read before or has changed."""
        if error.errno in _NO_DESCRIPTOR:
            with suppress(OSError):
                if self._read is not None and self._read[0] == _version(path.stat()):
                    return self._read[1]
            self.fault = f"{path.name} cannot be read by the agent: {error.strerror}"
        return otherwise


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def read_kill_switch(path: Path, last: LastRead[KillSwitch]) -> KillSwitch:
    """The node's kill switch; a file that stays empty, is unreadable, unknown or no file drains,
    and `last.unclear` says why."""
    last.fault, last.unclear, unclear_before = "", "", last.unclear
    try:
        path.stat()  # Without a file no descriptor is needed.
        # A pipe without a writer must not hold the beat up.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            text = os.read(file, _SWITCH_BYTES).strip()
            if text == b"hold":
                return last.keep(status, KillSwitch.HOLD)
            if not text and awaits_word(file):
                return KillSwitch.HOLD
            if text != b"drain":
                last.unclear = unclear_words(path, text, _KILL_WORDS)
            return last.keep(status, KillSwitch.DRAIN) if text else KillSwitch.DRAIN
        finally:
            os.close(file)
    except FileNotFoundError:
        # A link may lead to a file system that is away.
        if os.access(path, os.F_OK, follow_symlinks=False) and path.is_symlink():
            last.unclear = f"{path} is a link to a file that is not there"
            return KillSwitch.DRAIN
        return KillSwitch.NONE
    except OSError as error:
        switch = last.value(path, error, otherwise=KillSwitch.DRAIN)
        # The same file as before means the same as before.
        last.unclear = unclear_before
        if error.errno not in _NO_DESCRIPTOR:
            last.unclear = f"{path} cannot be read: {error.strerror}"
        return switch


def unclear_words(path: Path, text: bytes, known: Iterable[str]) -> str:
    """Why a file of this text has no known order, with the text and the words that it may have."""
    shown = one_line(text[:_SHOWN_BYTES].decode(errors="replace"))
    found = f"has {shown!r}" if shown else "is empty" if not text else "has no readable word"
    return f"{path} {found}: known are {', '.join(known)}"


def awaits_word(file: int) -> bool:
    """Whether an empty file is new enough that `echo hold >` may not have written it yet."""
    status = os.fstat(file)
    return stat.S_ISREG(status.st_mode) and 0.0 <= wall_seconds() - status.st_mtime < 0.1


def kill_switch_setter(path: Path) -> str:
    """The user of the kill file, who set the switch; a file that was removed has none."""
    try:
        return f"user {user_name(path.stat().st_uid)}, by the kill file"
    except OSError:
        return "operator, by the kill file"


class ReleaseFile:
    """An operator's word that a slot's quarantine may end, beside the slot's journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, int] | None = None
        self._taken: tuple[int, int] | None = None
        """Inode and time of the obeyed file: a file that cannot be removed counts once."""

    def read(self) -> str:
        """The operator's reason; "" without a request."""
        if not os.access(self._path, os.F_OK):  # Cheaper than an open that fails, at each beat.
            return ""
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in {0, os.geteuid()}:
                return ""
            if self._taken == (status.st_ino, status.st_mtime_ns):
                return ""
            text = os.read(file, RELEASE_BYTES_MAX).decode(errors="replace").strip()
            self._read = (status.st_ino, status.st_mtime_ns)
        except OSError:
            return ""
        finally:
            os.close(file)
        return text or "no reason given"

    def taken(self) -> None:
        """Remove the request, which was obeyed."""
        self._taken = self._read
        _log.warning("%s is obeyed", self._path.name)
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _log.error("%s was obeyed once, but stays there: %s", self._path, error.strerror)
