"""The phase control in the process of a test: jobs are threads."""

import threading
from pathlib import Path
from types import TracebackType

from harvester.contracts.clock import Clock, MonotonicClock
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.cluster.runtime_events import Call
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.phase_service import TICK_S
from scheduler.rollmux.control.planning import compile_for, make_service
from scheduler.rollmux.control.wire import WAIT_MAX_S, JobStatus, Reply, Waiting, checked
from scheduler.rollmux.permits.events import Enter
from scheduler.rollmux.permits.terms import PermitsConfig


class EmbeddedControl:
    """A transport and its control in this process. Context manager; jobs must leave before it
    closes."""

    def __init__(
        self,
        config: PermitsConfig | None = None,
        *,
        clock: Clock | None = None,
        state: Path | None = None,
        journal: Path | None = None,
        cluster: ClusterConfig | None = None,
    ) -> None:
        """Starts the control; with a `cluster` it plans."""
        self._clock = clock or MonotonicClock()
        compile_for(cluster)
        self._service = make_service(
            ControlSettings(
                permits=config or PermitsConfig(), state=state, journal=journal, cluster=cluster
            ),
            self._clock,
        )
        self._changed = threading.Condition()
        self._service.on_change = self._changed.notify_all
        self._closed = False
        self._ticking = threading.Thread(target=self._tick, name="phase-control", daemon=True)
        self._ticking.start()

    def call(self, message: Call) -> Reply:
        with self._changed:
            reply = self._service.call(checked(message))
            if not isinstance(message, Enter):
                return reply
            until_s = self._clock.now() + min(message.wait_s, WAIT_MAX_S)
            while isinstance(reply, Waiting) and (left_s := until_s - self._clock.now()) > 0:
                self._changed.wait(left_s)
                reply = self._service.entry_reply(message)
            return reply

    def jobs(self) -> tuple[JobStatus, ...]:
        """Status of every job."""
        with self._changed:
            return self._service.statuses()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._ticking.join()
        self._service.close()

    def __enter__(self) -> "EmbeddedControl":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _tick(self) -> None:
        with self._changed:
            while not self._closed:
                self._service.tick()
                self._changed.wait(TICK_S)
