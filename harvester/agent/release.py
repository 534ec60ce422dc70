"""An operator's word that a slot's quarantine may end: a file beside the slot's journal.

It works without the network and while the agent is down, and needs the right to write there.
"""

import logging
import os
import stat
from pathlib import Path

from harvester.config import AgentConfig, SlotConfig

_log = logging.getLogger(__name__)

MAX_BYTES = 400


def release_path(config: AgentConfig, slot: SlotConfig) -> Path:
    return config.state_dir / f"{slot.name}.release"


class ReleaseFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, int] | None = None
        self._taken: tuple[int, int] | None = None
        """Inode and time of the one that was obeyed: one that cannot be removed counts once."""

    def read(self) -> str:
        """The operator's reason; "" without a request."""
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
            text = os.read(file, MAX_BYTES).decode(errors="replace").strip()
            self._read = (status.st_ino, status.st_mtime_ns)
        except OSError:
            return ""
        finally:
            os.close(file)
        return text or "no reason given"

    def taken(self) -> None:
        """It was obeyed."""
        self._taken = self._read
        _log.warning("%s is obeyed", self._path.name)
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _log.error("%s counts once and cannot be removed: %s", self._path, error.strerror)
