"""The lock that admits one guest to a slot; free once every process of the last guest has ended.

The command that started the guest holds it, and the engine's main process, which inherits it.
Workers that outlive both are named by the guest's page. Only the holder of the lock may remove a
killed guest's segment of shared KV.
"""

import logging
import time

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.page import PageDirectory
from harvester.platform.file_lock import FileLock
from harvester.platform.kv_segment import KvSegment

_log = logging.getLogger(__name__)

GUEST_LOCK = "guest.lock"
_LOOK_S = 0.2
PATIENCE_S = 60.0
"""vLLM ends within some thirty seconds of being asked to, and its workers five later."""


class GuestLock:
    def __init__(self, pages: PageDirectory) -> None:
        self._pages = pages
        self._clock = MonotonicClock()
        file = pages.path / GUEST_LOCK
        try:
            self._lock = FileLock(file, mode=0o600)
        except OSError as error:
            raise ConfigError(f"cannot open the guest's lock {file}: {error.strerror}") from error

    @property
    def descriptor(self) -> int:
        """Lock file descriptor, inherited by the guest's main process."""
        return self._lock.descriptor

    def take(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait for the lock. Raises Exhausted after `timeout_s`, naming the holder."""
        until_s, reported = self._clock.now() + timeout_s, False
        while (there := self._occupants()) is not None:
            if self._clock.now() >= until_s:
                self._lock.release()
                raise Exhausted(f"{self._pages.path}: {there} still runs; stop it first")
            if not reported:
                _log.warning("waiting for the guest before this one to end: %s", there)
                reported = True
            time.sleep(_LOOK_S)
        self._lock.sign()

    def clear(self, segment: KvSegment) -> None:
        """Remove a killed guest's segment, after `take`. Raises Unsupported for a stranger's."""
        if segment.remove():
            _log.warning("removing %s, a leftover of a killed guest", segment.path)

    def close(self) -> None:
        """Close this descriptor; the lock holds while a process that inherited it lives."""
        self._lock.close()

    def _occupants(self) -> str | None:
        if not self._lock.take():
            return f"a guest (started by process {self._lock.holder()})"
        reader = self._pages.guest_reader()
        try:
            left = reader.read_left().record
        finally:
            reader.close()
        for process in () if left is None else left.processes:
            if process.lives():
                return f"process {process.pid} of a guest"
        return None
