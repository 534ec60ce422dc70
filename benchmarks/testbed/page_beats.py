"""Production and guest as their pages alone, written by a thread at the pace of real ones."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import Guest, PageDirectory, Pulse


def idle_pulse(_step: int) -> Pulse:
    return Pulse(model_samples=1000)


def shared_group(path: Path) -> str:
    """A control group's files as the kernel shows them: production and guest share memory, half of
    which is free."""
    path.mkdir()
    for name, text in (("current", "500"), ("max", "1000"), ("stat", "")):
        (path / f"memory.{name}").write_text(text)
    return str(path)


class PageBeats:
    """An engine and a guest on each slot, alive until `stop`."""

    def __init__(
        self,
        slots: Sequence[PageDirectory],
        *,
        beat_s: float = 0.1,
        ttl_ns: int = 500_000_000,
        pulse: Callable[[int], Pulse] = idle_pulse,
    ) -> None:
        """`pulse`: the page at the n-th beat; a later value of the attribute counts from then."""
        self.pulse = pulse
        self._pulses = [pages.pulse_writer("prod", 0) for pages in slots]
        self._guests = [pages.guest_writer() for pages in slots]
        self._beat_s, self._ttl_ns = beat_s, ttl_ns
        self._stopped = threading.Event()
        self._writing = threading.Lock()
        self.step = 0
        """Beats so far."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self) -> None:
        """A beat out of turn."""
        with self._writing:
            self.step += 1
            now_ns, pulse = monotonic_ns(), self.pulse(self.step)
            for production in self._pulses:
                production.write(pulse, now_ns=now_ns, ttl_ns=self._ttl_ns)
            for guest in self._guests:
                record = Guest(steps_finished=self.step)
                guest.write(record, now_ns=now_ns, ttl_ns=self._ttl_ns)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        self.write()
        while not self._stopped.wait(self._beat_s):
            self.write()
