"""Watches an MPS daemon beside the beat, and ends a guest under it without harm to production.

The daemon is queried from a separate thread: it may take seconds to answer or never do, and a late
grant closes the gate. The reading is the daemon's last answer; a late answer counts as none.
"""

import logging
import threading
from collections.abc import Iterable

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import PeerProtocolError, Unsupported
from harvester.platform.mps import MpsControl, ServerStatus
from harvester.policy.sample import MpsReading

_log = logging.getLogger(__name__)

_MAX_SERVERS = 16
_MAX_CLIENTS = 64
"""More do not share one GPU."""
_STALE_QUERIES = 4
_UNSEEN = MpsReading(fault="the MPS daemon has not been queried yet")


class MpsWatch:
    """`start`, then `read` at every beat; `close` may wait for the query under way."""

    def __init__(self, control: MpsControl, *, look_s: float) -> None:
        self._control = control
        self._look_s = look_s
        self._clock = MonotonicClock()
        self._seen, self._seen_at_s = _UNSEEN, 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rosemux-mps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, *, wait: bool = True) -> None:
        self._stopped.set()
        if wait and self._thread.is_alive():
            self._thread.join(timeout=4 * self._control.timeout_s)

    def read(self) -> MpsReading:
        late_s = self._clock.now() - self._seen_at_s
        stale_s = _STALE_QUERIES * (self._look_s + self._control.timeout_s)
        if not self._seen.fault and late_s > stale_s:
            return MpsReading(fault=f"the MPS daemon has not answered for {late_s:.0f} s")
        return self._seen

    def query(self) -> None:
        """Ask once, in the caller's thread."""
        seen = self._answer()
        if seen.fault and seen.fault != self._seen.fault:
            _log.warning("mps: %s", seen.fault)
        self._seen, self._seen_at_s = seen, self._clock.now()

    def terminate(self, pids: Iterable[int]) -> bool:
        """End the GPU work of MPS clients. Returns whether all processes may now be killed."""
        targets, safe = set(pids), True
        try:
            for server in self._control.servers()[:_MAX_SERVERS]:
                for client in sorted(targets.intersection(self._control.clients(server))):
                    safe = self._control.terminate_client(server, client) and safe
        except (Unsupported, PeerProtocolError) as error:
            _log.error("mps: %s", error)
            return False
        return safe

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.query()
            self._stopped.wait(self._look_s)

    def _answer(self) -> MpsReading:
        try:
            servers = self._control.servers()[:_MAX_SERVERS]
            groups = tuple(self._control.clients(one)[:_MAX_CLIENTS] for one in servers)
            states = {self._control.status(one) for one in servers}
        except (Unsupported, PeerProtocolError) as error:
            return MpsReading(fault=str(error))
        return MpsReading(clients=groups, server_fault=ServerStatus.FAULT in states)
