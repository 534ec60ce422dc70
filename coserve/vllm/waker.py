"""Wakes a guest whose gate is closed, and gives back what it holds when nobody grants any more.

While the gate is closed the engine loop sleeps in its input queue, so that a waiting guest costs
nothing. This thread watches the slot's pages by their sequence numbers, evaluates the gate only
when one of them changed, and puts a wake-up into that queue. Slack only shrinks as time passes, so
without a changed page a closed gate cannot open.
"""

import threading
from collections.abc import Callable

from coserve.guest_slot import GuestSlot

# Opening is noticed within this time. A poll costs about ten microseconds: 1 % of a core.
POLL_S = 0.001
BEAT_S = 0.1
# A page that was deleted and made anew has a new sequence; the full read finds it.
_FULL_READ_POLLS = 50


class Waker(threading.Thread):
    """Armed by the engine loop when it stops for a closed gate."""

    def __init__(self, slot: GuestSlot, wake: Callable[[], None]) -> None:
        super().__init__(name="rosemux-waker", daemon=True)
        self._slot = slot
        self._wake = wake
        self._armed = threading.Event()
        self._stopped = threading.Event()
        self.abort_all = threading.Event()

    def arm(self) -> None:
        """The loop is about to sleep with work left; wake it when the gate opens."""
        self._armed.set()

    def stop(self) -> None:
        self._stopped.set()
        self._armed.set()

    def run(self) -> None:
        while not self._stopped.is_set():
            if self._armed.wait(timeout=BEAT_S) and not self._stopped.is_set():
                self._watch()
            else:
                self._slot.publish()

    def _watch(self) -> None:
        seen: tuple[int, ...] = ()
        polls = 0
        while not self._stopped.is_set():
            sequences = self._slot.sequences()
            if sequences != seen or polls % _FULL_READ_POLLS == 0:
                seen = sequences
                if self._slot.decide().open:
                    break
                if self._slot.grace_over():
                    self.abort_all.set()
                    break
            if polls % round(BEAT_S / POLL_S) == 0:
                self._slot.publish()
            polls += 1
            self._stopped.wait(POLL_S)
        self._armed.clear()
        self._wake()
