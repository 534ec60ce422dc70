"""Checks with the kernel, as long as the guest runs, whether its isolation holds.

An isolation is set up once. Afterwards production may restart, an operator may move a service into
another control group, or a reclaim may lift the guest: the kernel's ranking then changes and
nothing reports it. An unverifiable isolation does not hold: the guest's steps count whole.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass

from coserve.guest.isolation import IDLE_CLASS, IDLE_GROUP, check_beside
from harvester.contracts.errors import PeerProtocolError, Unsupported
from harvester.contracts.isolation import IsolationBackend
from harvester.contracts.page import PageDirectory
from harvester.contracts.process import ProcessId, family, start_ticks

_log = logging.getLogger(__name__)

LOOK_S = 1.0
MOST_PROCESSES = 256


@dataclass(frozen=True, slots=True)
class ObservedIsolation:
    """A guest beside production, as it was seen last."""

    blocking_ratio: float = 1.0
    """Share of a running guest step that can delay production."""
    fault: str = ""
    """Why the isolation does not hold; "" if it does, or if the backend needs no check."""


class IsolationWatch(threading.Thread):
    """Looks every second; only a backend of `PREEMPTING` needs one."""

    def __init__(
        self,
        backend: IsolationBackend,
        directory: PageDirectory,
        *,
        guest: Callable[[], Iterable[ProcessId]],
    ) -> None:
        """`guest` says which processes the engine has."""
        super().__init__(name="rosemux-isolation", daemon=True)
        self._isolation = IDLE_GROUP if backend is IsolationBackend.IDLE_GROUP else IDLE_CLASS
        self._directory = directory
        self._guest = guest
        self._stopped = threading.Event()
        self.observed = ObservedIsolation(fault="not looked at yet")

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.is_set():
            self.look()
            self._stopped.wait(LOOK_S)

    def look(self) -> None:
        """Ask once, in the caller's thread."""
        try:
            self._check()
            observed = ObservedIsolation(self._isolation.blocking_ratio)
        except (OSError, PeerProtocolError, Unsupported) as error:
            observed = ObservedIsolation(fault=str(error))
        except Exception as error:
            # If this thread ended, its last observation would stay in force for ever.
            _log.exception("the watch goes on after an error")
            observed = ObservedIsolation(fault=f"it cannot be looked at: {error}")
        before, self.observed = self.observed, observed
        if observed.fault and observed.fault != before.fault:
            _log.warning("no isolation, steps count whole (blocking ratio 1): %s", observed.fault)
        elif before.fault and not observed.fault:
            _log.warning("isolation %s holds", self._isolation.backend)

    def _check(self) -> None:
        guest = tuple(process.pid for process in self._guest())
        if not guest:
            raise Unsupported("the guest does not know its processes yet")
        production = [pid for root in self._roots() for pid in family(root.pid)]
        if len(production) > MOST_PROCESSES:
            raise Unsupported(f"isolation unknown: production has over {MOST_PROCESSES} processes")
        check_beside(self._isolation, guest=guest, production=production)

    def _roots(self) -> list[ProcessId]:
        """First process of every engine that the grant names."""
        with closing(self._directory.grant_reader()) as grants:
            grant = grants.read().record
        if grant is None or not grant.pulses:
            raise Unsupported("no grant names production's pulses")
        return [self._root(name) for name in grant.pulses]

    def _root(self, name: str) -> ProcessId:
        with closing(self._directory.pulse_reader(name)) as pulses:
            reading = pulses.read()
        if reading.record is None:
            raise Unsupported(f"{name}: {reading.fault}")
        root = reading.record.root
        if root is None:
            raise Unsupported(f"{name} does not name production's processes (an older RoseMux?)")
        if start_ticks(root.pid) != root.start_ticks:
            raise Unsupported(
                f"{name}: production's process {root.pid} cannot be seen from here (another pid "
                "namespace, or /proc mounted with hidepid)"
            )
        return root
