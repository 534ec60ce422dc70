"""A slot's place for one guest; it is free once every process of the previous guest has ended.

The place is a file lock, which the kernel releases when all its holders have ended: the command
that started the guest and the engine's main process, which inherits the file. Workers that outlive
both are named by the guest's page. Only the holder of a free place may remove what a killed guest
left: a segment of shared KV that would go on counting as memory in use.
"""

import fcntl
import logging
import os
import time
from pathlib import Path

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.page import PageDirectory
from harvester.contracts.process import start_ticks
from harvester.platform.kv_segment import KvSegment

_log = logging.getLogger(__name__)

_LOCK = "guest.lock"
_LOOK_S = 0.2
PATIENCE_S = 60.0
"""vLLM ends within some thirty seconds of being asked to, and its workers five later."""


class GuestPlace:
    def __init__(self, pages: PageDirectory, *, clock: Clock | None = None) -> None:
        self._pages = pages
        self._clock = clock or MonotonicClock()
        self._lock = _opened(pages.path / _LOCK)

    @property
    def descriptor(self) -> int:
        """Lock file descriptor, inherited by the guest's main process."""
        return self._lock

    def take(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait for the lock. Raises Exhausted, naming the process that still holds it, after
        `timeout_s`.
        """
        until_s, told = self._clock.now() + timeout_s, False
        while (there := self._occupants()) is not None:
            if self._clock.now() >= until_s:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
                raise Exhausted(f"{self._pages.path}: {there} still runs; stop it first")
            if not told:
                _log.warning("waiting for the guest before this one to end: %s", there)
                told = True
            time.sleep(_LOOK_S)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)

    def clear(self, segment: KvSegment) -> None:
        """Remove the segment that a killed guest left; call after `take`. Raises Unsupported if the
        segment belongs to a user who is not trusted.
        """
        if segment.remove():
            _log.warning("removing %s, a leftover of a killed guest", segment.path)

    def close(self) -> None:
        """Close this process's descriptor; the lock holds while a process that inherited it
        lives.
        """
        os.close(self._lock)

    def _occupants(self) -> str | None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            return f"a guest (started by process {holder or '?'})"
        reader = self._pages.guest_reader()
        try:
            left = reader.read_left().record
        finally:
            reader.close()
        for process in () if left is None else left.processes:
            if start_ticks(process.pid) == process.start_ticks:
                return f"process {process.pid} of a guest"
        return None


def _opened(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot take the guest's place {file}: {error.strerror}") from error
