"""Publishes the pulse of a production engine from inside its API-server process.

The middleware and the statistics logger of one process feed one book. The page is written on every
event and by a timer of its own, because an idle engine emits nothing and silence must not look like
idleness. Read-only for production: no request is touched, and no error in here reaches one.
"""

import threading

from coserve.pulse_book import EngineStep, PulseBook
from coserve.vllm.environment import Role, SlotEnvironment, slot_environment
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import PageDirectory

BEAT_S = 0.1
PULSE_TTL_NS = 500_000_000
_REFIT_BEATS = 10


class PulseReporter:
    """Thread-safe: the event loop reports, the timer beats."""

    def __init__(self, environment: SlotEnvironment) -> None:
        directory = PageDirectory(environment.directory)
        self._page = directory.pulse_writer(environment.engine, environment.process)
        self._book = PulseBook()
        self._lock = threading.Lock()
        self._next_key = 0
        threading.Thread(target=self._beat, name="rosemux-pulse", daemon=True).start()

    def arrive(self, *, body_bytes: int) -> int:
        """A request came in; the key is for `finish`."""
        now_ns = monotonic_ns()
        with self._lock:
            self._next_key += 1
            self._book.arrive(self._next_key, body_bytes=body_bytes, now_ns=now_ns)
            self._write(now_ns)
            return self._next_key

    def finish(self, key: int) -> None:
        now_ns = monotonic_ns()
        with self._lock:
            self._book.finish(key, now_ns=now_ns)
            self._write(now_ns)

    def step(self, step: EngineStep) -> None:
        now_ns = monotonic_ns()
        with self._lock:
            self._book.step(step, now_ns=now_ns)
            self._write(now_ns)

    def _write(self, now_ns: int) -> None:
        self._page.write(self._book.pulse(now_ns=now_ns), now_ns=now_ns, ttl_ns=PULSE_TTL_NS)

    def _beat(self) -> None:
        timer = threading.Event()
        beats = 0
        while not timer.wait(BEAT_S):
            beats += 1
            with self._lock:
                if beats % _REFIT_BEATS == 0:
                    self._book.refit()
                self._write(monotonic_ns())


_reporter: PulseReporter | None = None
_reporter_lock = threading.Lock()


def process_reporter() -> PulseReporter | None:
    """The one reporter of this process; None outside a production engine of a slot."""
    global _reporter
    with _reporter_lock:
        if _reporter is None:
            environment = slot_environment()
            if environment is None or environment.role is not Role.PRODUCTION:
                return None
            _reporter = PulseReporter(environment)
        return _reporter
