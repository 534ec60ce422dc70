"""The slot's grant, written by the benchmark in an agent's place.

For what no agent is asked about: how soon a gate obeys, and what a step costs that no law sized.
"""

import threading

from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import Grant, GrantMode, PageDirectory

_TTL_NS = 500_000_000
_BEAT_S = 0.1


class GrantWriter:
    """Repeats the last grant as an agent does; closed until another is given."""

    def __init__(self, pages: PageDirectory) -> None:
        self._page = pages.grant_writer()
        self._grant = Grant(epoch=1, mode=GrantMode.CLOSED)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> "GrantWriter":
        self.write(self._grant)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._page.close(unlink=True)

    def write(self, grant: Grant) -> int:
        """Puts a grant in force; returns the time just before, in ns."""
        with self._lock:
            self._grant, now_ns = grant, monotonic_ns()
            self._page.write(grant, now_ns=now_ns, ttl_ns=_TTL_NS)
        return now_ns

    def _repeat(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            with self._lock:
                self._page.write(self._grant, now_ns=monotonic_ns(), ttl_ns=_TTL_NS)
