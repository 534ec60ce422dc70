"""A value that is read from files, and read again when one of them changes."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from harvester.contracts.errors import RoseMuxError

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Renewed(Generic[T]):
    """`read` raises a RoseMuxError for files that cannot be used. The first time it is raised;
    later the last good value stays in force, and the error is logged once for each change.
    """

    def __init__(self, files: Iterable[Path], read: Callable[[], T]) -> None:
        self._files = tuple(files)
        self._read = read
        # Before the value: a file that changes in between is read again.
        self._seen = self._state()
        self._value = read()

    def current(self) -> T:
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._value = self._read()
            except RoseMuxError as error:
                _log.error(
                    "a changed file is not usable, its earlier content stays in force: %s", error
                )
        return self._value

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(state_of, self._files))


def state_of(path: Path) -> tuple[int, int, int] | None:
    """Inode, time of change and size, None without the file. Links are followed: a mounted file is
    changed by moving one."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
