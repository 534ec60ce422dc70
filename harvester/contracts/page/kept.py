"""A page of a process that lives longer than its page: made again after each loss.

A page that cannot be written raises nothing and is absent: logged once with its reason, a fault to
every reader, and tried again on the process's beat.
"""

import logging
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.page.records import Record
from harvester.contracts.page.writer import PageWriter
from harvester.contracts.page.writer_lock import WriterLock

R = TypeVar("R", bound=Record)

_NEW = "not made yet"
_log = logging.getLogger(__name__)


class KeptPage(Generic[R]):
    """Thread-safe."""

    def __init__(self, path: Path, kind: type[R]) -> None:
        self.path = path
        self.absence = _NEW
        """Why nothing is written; "" while it is."""
        self._kind = kind
        # Outlives each file that it locks: a refused process keeps signalling its presence.
        self._lock = WriterLock(path)
        self._page: PageWriter[R] | None = None
        self._contested = False
        self._writing = Lock()

    def reserve(self) -> None:
        """Take the writer lock; the content stays. Raises PageHeld, ConfigError, Exhausted."""
        self._lock.take()

    def make(self) -> None:
        """Make the page now; raises as `reserve` does where there can be none."""
        self.reserve()
        page = PageWriter(self.path, self._kind, lock=self._lock)
        with self._writing:
            self._page, self.absence = page, ""

    def keep(self) -> None:
        """Now and then: make the page again if it was lost."""
        page = self._page
        if page is not None and page.check():
            self._log_contest(page)
            return
        if page is not None:
            with self._writing:
                self._page = None
                page.close()
        try:
            made = PageWriter(self.path, self._kind, lock=self._lock)
        except (ConfigError, Exhausted, OSError) as error:
            self._absent(str(error))
            return
        with self._writing:
            self._page = made
        if page is not None:
            _log.warning("page %s was deleted, replaced or cut short, and is made again", self.path)
        elif self.absence != _NEW:
            _log.warning("page %s is written now", self.path)
        self.absence = ""
        self._log_contest(made)

    def write(self, record: R, *, now_ns: int, ttl_ns: int) -> None:
        """Raises ValueError for a record that does not fit into a page."""
        with self._writing:
            page = self._page
            if page is None:
                return
            try:
                page.write(record, now_ns=now_ns, ttl_ns=ttl_ns)
            except (ConfigError, Exhausted) as error:
                self._page = None
                page.close()
                reason = str(error)
            else:
                return
        self._absent(reason)

    def close(self, *, unlink: bool = False) -> None:
        with self._writing:
            page, self._page = self._page, None
            if page is not None:
                page.close(unlink=unlink)
            self._lock.close()

    def _absent(self, reason: str) -> None:
        if reason != self.absence:
            self.absence = reason
            _log.warning("the page cannot be written, and is tried again: %s", reason)

    def _log_contest(self, page: PageWriter[R]) -> None:
        if page.contested != self._contested:
            self._contested = page.contested
            _log.error(
                "page %s: %s",
                self.path,
                "two processes write it, and neither is believed: give each engine a name of its "
                "own (ROSEMUX_ENGINE), or stop one"
                if page.contested
                else "one process writes it again",
            )
