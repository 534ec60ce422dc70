"""Wakes a guest whose gate is closed, and gives back what it holds when nobody grants any more.

While the gate is closed the engine loop sleeps in its input queue, so that a waiting guest costs
nothing. This thread watches the slot's pages by their sequence numbers, evaluates the gate only
when one of them changed, and puts a wake-up into that queue. Slack only shrinks as time passes, so
without a changed page only a probe can open a closed gate, and that one may wait.

It decides nothing that the engine loop would not decide again: the loop is woken when the gate
opens, when it has to give memory back or may take it again, and once when the grace after a lost
grant is over.
"""

import logging
import threading
import time
from collections.abc import Callable

from coserve.guest_slot import GuestSlot

# Opening is noticed within this time.
POLL_S = 0.001
BEAT_S = 0.1
# With nothing to step, only memory can be asked for.
_IDLE_S = 0.02
_BEAT_IDLES = round(BEAT_S / _IDLE_S)
# The full read finds what no sequence shows: a page deleted and made anew, one that expired.
_FULL_READ_POLLS = 50
_BEAT_POLLS = round(BEAT_S / POLL_S)

_log = logging.getLogger(__name__)


class Waker(threading.Thread):
    """Armed by the engine loop when it stops for a closed gate."""

    def __init__(self, slot: GuestSlot, wake: Callable[[], None]) -> None:
        super().__init__(name="rosemux-waker", daemon=True)
        self._slot = slot
        self._wake = wake
        self._armed = threading.Event()
        self._stopped = threading.Event()
        self._told_grace_over = False
        self._idles = 0

    def arm(self) -> None:
        """The loop is about to sleep with work left; wake it when the gate opens."""
        self._armed.set()

    def stop(self) -> None:
        self._stopped.set()
        self._armed.set()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._beat()
            except Exception:
                # Without this thread a closed gate would stay closed for ever.
                _log.exception("the waker goes on after an error")
                self._stopped.wait(BEAT_S)

    def _beat(self) -> None:
        if not self._armed.wait(timeout=_IDLE_S):
            # No work, or work that goes on: keep the grant's age and the guest page true.
            self._slot.decide()
            self._told_grace_over &= self._slot.grace_over()
            if self._slot.owes_memory():
                self._wake()
            self._idles += 1
            if self._idles % _BEAT_IDLES == 0:
                self._slot.publish()
        elif self._watch():
            # Cleared before the wake-up: a loop that finds the gate closed again arms again.
            self._armed.clear()
            self._wake()

    def _watch(self) -> bool:
        """True once the loop must wake up, False when stopped."""
        seen: tuple[int, ...] = ()
        polls = 0
        while not self._stopped.is_set():
            sequences = self._slot.sequences()
            if sequences != seen or polls % _FULL_READ_POLLS == 0:
                seen = sequences
                if self._must_wake():
                    return True
            if polls % _BEAT_POLLS == 0:
                self._slot.publish()
            polls += 1
            # Not the event's own wait: it makes a lock each time, and this is all that a closed
            # gate costs.
            time.sleep(POLL_S)
        return False

    def _must_wake(self) -> bool:
        opened = self._slot.decide().open
        over, told = self._slot.grace_over(), self._told_grace_over
        self._told_grace_over = over
        return opened or (over and not told) or self._slot.owes_memory()
