"""Wakes a guest whose gate is closed, and ends it where its memory is not back in time.

While the gate is closed the engine loop sleeps in its input queue. This thread sleeps too, until a
page that can open the gate is written: the grant page if the grant has closed it, else any page of
the slot. Slack only shrinks as time passes, so without a changed page only the end of a rest or a
probe can open a closed gate, and a probe may wait. The loop is woken when the gate opens, when it
must return memory or may take it again, and once when the grace after a lost grant is over; it
decides again itself.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from coserve.guest.guest_slot import GuestSlot
from coserve.guest.memory_deadline import end_guest
from harvester.contracts.bell import PrivateBell, Word, sleep_until_rung
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.process import ProcessId

# Period of grants. After this time without a grant the pages are read for changes that no writer
# signals: a page that expired or was recreated, a grace that is over.
BEAT_S = 0.1
# Busy production writes hundreds of pulses in a second; an opening waits no longer than this.
_PAUSE_NS = 1_000_000

_log = logging.getLogger(__name__)


class Waker(threading.Thread):
    """Armed by the engine loop when it stops for a closed gate."""

    def __init__(
        self,
        slot: GuestSlot,
        wake: Callable[[], None],
        *,
        end: Callable[[Iterable[ProcessId]], None] | None = end_guest,
    ) -> None:
        """`end`: None if the guest must not end itself."""
        super().__init__(name="rosemux-waker", daemon=True)
        self._slot = slot
        self._wake = wake
        self._end = end
        self._bell = PrivateBell()
        self._armed = False
        self._stopped = threading.Event()
        self._reported_grace_over = False
        self._publish_ns = 0

    def arm(self) -> None:
        """The loop is about to sleep with work left; wake it when the gate opens."""
        if not self._armed:
            self._armed = True
            self._bell.ring()

    def stop(self) -> None:
        self._stopped.set()
        self._bell.ring()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                if self._armed:
                    self._watch()
                else:
                    self._rest()
            except Exception:
                # If this thread ended, a closed gate would stay closed for ever.
                _log.exception("the waker goes on after an error")
                self._stopped.wait(BEAT_S)

    def _rest(self) -> None:
        """No work, or work that goes on: keep the grant's age and the guest page true."""
        rung = self._bell.word()
        written = self._slot.written(grant_only=True)
        self._slot.decide()
        self._reported_grace_over &= self._slot.grace_over()
        if self._slot.owes_memory():
            self._wake()
        self._beat()
        if not self._armed:
            self._sleep((rung, *written), grant_only=True)

    def _watch(self) -> None:
        """Watches the pages until the loop must wake up."""
        while not self._stopped.is_set():
            grant_only, looked_ns = self._slot.last.closed_by_grant, monotonic_ns()
            # Read before the decision, so that a write in between ends the sleep at once.
            rung, written = self._bell.word(), self._slot.written(grant_only=grant_only)
            if self._must_wake():
                # Cleared before the wake-up: a loop that finds the gate closed again arms again.
                self._armed = False
                self._wake()
                return
            self._beat()
            if self._slot.last.closed_by_grant == grant_only:
                self._sleep((rung, *written), grant_only=grant_only)
            time.sleep(max(0, looked_ns + _PAUSE_NS - monotonic_ns()) * 1e-9)

    def _sleep(self, words: tuple[Word, ...], *, grant_only: bool) -> None:
        """Sleep until one of the words has changed. Without futexes, poll the words."""
        sleep_s = min(BEAT_S, self._slot.last.rest_s or BEAT_S)
        until_ns = monotonic_ns() + int(sleep_s * 1e9)
        while (left_ns := until_ns - monotonic_ns()) > 0:
            sleep_until_rung(words, timeout_s=left_ns * 1e-9)
            if (self._bell.word(), *self._slot.written(grant_only=grant_only)) != words:
                return

    def _beat(self) -> None:
        now_ns = monotonic_ns()
        if now_ns >= self._publish_ns:
            self._publish_ns = now_ns + int(0.9e9 * BEAT_S)
            if self._end is not None and self._slot.memory_missed():
                _log.critical("memory that production needs is not back in time: this guest ends")
                self._slot.close()
                self._end(self._slot.load.processes)
            self._slot.publish()

    def _must_wake(self) -> bool:
        opened = self._slot.decide().open
        over, reported = self._slot.grace_over(), self._reported_grace_over
        self._reported_grace_over = over
        return opened or (over and not reported) or self._slot.owes_memory()
