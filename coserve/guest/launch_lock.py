"""Lets engines start on a GPU one at a time.

An engine sizes itself by the memory that is free at its start and temporarily takes more than it
keeps. Two engines that start together misread each other's memory as free or as gone. The lock is a
file lock, which the kernel releases when its holder ends.
"""

import time
from collections.abc import Iterable
from pathlib import Path

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.ids import checked_name
from harvester.platform.file_lock import FileLock

_LOOK_S = 0.2


class LaunchLock:
    """Locks all GPUs that one engine uses. `directory` is common to all guests of the machine."""

    def __init__(self, directory: Path, gpus: Iterable[str], *, clock: Clock | None = None) -> None:
        self._files = [
            # All engines lock in one order, so that two engines of several GPUs never deadlock.
            directory / f"{checked_name(gpu, what='GPU')}.launch"
            for gpu in sorted(set(gpus))
        ]
        self._held: list[FileLock] = []
        self._clock = clock or MonotonicClock()

    def acquire(self, *, timeout_s: float) -> None:
        """Wait for the locks. Raises Exhausted after `timeout_s`, naming the process that is
        starting an engine, and ConfigError if a lock file cannot be opened."""
        until_s = self._clock.now() + timeout_s
        try:
            for file in self._files:
                self._held.append(self._locked(file, until_s, timeout_s))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Unlock, for children that inherited the files too. Idempotent."""
        while self._held:
            held = self._held.pop()
            held.release()
            held.close()

    def _locked(self, file: Path, until_s: float, timeout_s: float) -> FileLock:
        try:
            lock = FileLock(file)
        except OSError as error:
            raise ConfigError(
                f"cannot lock a GPU's launches by {file}: {error.strerror}"
            ) from error
        try:
            while not lock.take():
                if self._clock.now() >= until_s:
                    raise Exhausted(
                        f"process {lock.holder()} has been starting an engine on {file.stem} "
                        f"for longer than {timeout_s:.0f} s"
                    )
                time.sleep(_LOOK_S)
            lock.sign()
        except BaseException:
            lock.close()
            raise
        return lock
