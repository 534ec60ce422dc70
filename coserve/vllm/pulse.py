"""Publishes the pulse of a production engine from inside its API-server process.

The middleware and the statistics logger of one process feed one book. The page is written on every
event and by a timer, because an idle engine emits no events and silence must not look like
idleness. The slot's grant is watched too: production's step times are learned while it is closed.
While there is something to learn, so are the pulses of the engine's other API servers, whose
requests share its steps. Read-only for production: no request is touched, and no error here reaches
one. After an error the pulse stops for good, which closes every gate. A page that cannot be written
(no space, another user's, a living engine of the same name) is retried on every beat; production
serves on without it.
"""

import itertools
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from coserve.law.engine_step import NO_SIBLINGS, EngineStep, Siblings
from coserve.pulse.pulse_book import PulseBook
from coserve.vllm.environment import Role, SlotEnvironment, slot_environment
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import (
    KeptPage,
    PageDirectory,
    PageFault,
    PageReader,
    Pulse,
    pulse_page,
)
from harvester.contracts.page.owners import OWNERS_VARIABLE
from harvester.contracts.process import ProcessId, process_ids

BEAT_S = 0.1
PULSE_TTL_NS = 500_000_000
_REFIT_BEATS = 10

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Facts about an engine that one of its API servers knows, and that server's place in it."""

    step_tokens: int = 0
    """The engine's token limit per step; 0 if unknown."""
    processes: int = 0
    """API servers of the engine; 0 if unknown."""
    process: int | None = None
    """Index of this API server; None takes the index from the process's name."""
    shape: str = ""
    """Model, parallelism and accelerator; "" if unknown."""


class PulseReporter:
    """Thread-safe: the event loop reports, the timer beats."""

    def __init__(
        self,
        environment: SlotEnvironment,
        shape: Callable[[], EngineShape] = EngineShape,
    ) -> None:
        """`shape` reads upstream's configuration; its errors are caught here."""
        self._directory = PageDirectory(environment.directory, environment.owners)
        self._engine, self._process = environment.engine, environment.process
        self._siblings: tuple[PageReader[Pulse], ...] = ()
        self._book = PulseBook(root=_root(), middleware=False)
        self._grant = self._directory.grant_reader()
        self._grant_seen: bytes | None = None
        self._told_stranger = False
        self._lock = threading.Lock()
        self._keys = itertools.count(1)
        self._silent = False
        self._beats = 0
        self._page: KeptPage[Pulse] | None = None
        self.report(lambda _: self._take(shape()))
        self._page = self._directory.own_pulse(self._engine, self._process)
        self._find_page()
        threading.Thread(target=self._run, name="rosemux-pulse", daemon=True).start()

    def attach_middleware(self) -> None:
        """Record that the middleware is installed, so that arrivals are reported from now on."""
        self.report(lambda _: setattr(self._book, "middleware", True))

    def connect(self) -> int:
        """Record an opened WebSocket; returns the key for `finish`."""
        key = next(self._keys)
        self.report(lambda _: self._book.connect(key))
        return key

    def speak(self) -> None:
        """Record a message over a WebSocket; it is published with the next step."""
        self._book.spoken_ns = monotonic_ns()

    def arrive(self, *, body_bytes: int) -> int:
        """Record a request whose body is complete; returns the key for `finish`."""
        key = next(self._keys)
        self.report(lambda now_ns: self._arrive(key, body_bytes, now_ns))
        return key

    def finish(self, key: int, *, outlived: bool = False) -> None:
        self.report(lambda now_ns: self._book.finish(key, now_ns=now_ns, outlived=outlived))

    def step(self, read: Callable[[], EngineStep]) -> None:
        """Record a step. `read` makes it from upstream's objects; its errors are caught here."""
        self.report(lambda now_ns: self._step(read(), now_ns))

    def report(self, change: Callable[[int], None]) -> None:
        """Apply one change to the book and publish it."""
        with self._lock:
            if self._silent:
                return
            try:
                now_ns = monotonic_ns()
                change(now_ns)
                if self._page is not None:
                    pulse = self._book.pulse(now_ns=now_ns)
                    self._page.write(pulse, now_ns=now_ns, ttl_ns=PULSE_TTL_NS)
            except Exception:
                self._fall_silent()

    def _fall_silent(self) -> None:
        self._silent = True
        _log.exception("RoseMux reports no pulse any more; production is not affected")

    def _run(self) -> None:
        timer = threading.Event()
        while not (timer.wait(BEAT_S) or self._silent):
            try:
                self._find_page()
            except Exception:
                with self._lock:
                    self._fall_silent()
            self.report(self._beat)

    def _step(self, step: EngineStep, now_ns: int) -> None:
        if self._grant.sequence() != self._grant_seen:
            self._look_at_grant(now_ns)
        self._book.step(step, now_ns=now_ns, beside=self._beside(now_ns))

    def _arrive(self, key: int, body_bytes: int, now_ns: int) -> None:
        beside = self._beside(now_ns)
        self._book.arrive(key, body_bytes=body_bytes, now_ns=now_ns, beside=beside)

    def _take(self, shape: EngineShape) -> None:
        self._book.step_tokens, self._book.processes = shape.step_tokens, shape.processes
        self._book.shape = shape.shape
        if shape.process is not None:
            self._process = shape.process
        others = [place for place in range(shape.processes) if place != self._process]
        self._siblings = tuple(
            self._directory.pulse_reader(pulse_page(self._engine, place)) for place in others
        )

    def _beside(self, now_ns: int) -> Siblings | None:
        """State of the other API servers; None if one is silent, or if nothing can be learned."""
        if not self._siblings:
            return NO_SIBLINGS
        if self._book.alone_since_ns is None:
            return None
        pulses = [page.read(now_ns=now_ns).record for page in self._siblings]
        present = [pulse for pulse in pulses if pulse is not None]
        if len(present) < len(pulses):
            return None
        return Siblings(
            in_flight=sum([pulse.in_flight for pulse in present]),
            waiting=sum([pulse.waiting for pulse in present]),
            decoding=sum([pulse.decoding for pulse in present]),
            requests_total=sum([pulse.requests_total for pulse in present]),
            steps_total=sum([pulse.steps_total for pulse in present]),
        )

    def _look_at_grant(self, now_ns: int) -> None:
        """Track whether a guest may step. A missing or expired grant closes the guest's gate; a
        grant that only this process cannot read may not."""
        grant = self._grant.read(now_ns=now_ns)
        self._grant_seen = self._grant.sequence()
        if grant.fault is PageFault.FOREIGN and not self._told_stranger:
            self._told_stranger = True
            _log.warning(
                "RoseMux: the grant in %s belongs to a user that %s does not name as agent: step "
                "times are not learned, and the slot stays closed",
                self._grant.path.parent,
                OWNERS_VARIABLE,
            )
        if grant.record is None:
            closed = grant.fault in (PageFault.MISSING, PageFault.EXPIRED)
        else:
            closed = not grant.record.mode.admits
        if not closed:
            self._book.alone_since_ns = None
        elif self._book.alone_since_ns is None:
            self._book.alone_since_ns = now_ns

    def _beat(self, now_ns: int) -> None:
        self._look_at_grant(now_ns)
        self._beats += 1
        if self._beats % _REFIT_BEATS == 0:
            self._book.refit()

    def _find_page(self) -> None:
        """Create the page, again if it was lost, its directory appeared later or another engine
        held it."""
        assert self._page is not None
        self._page.keep()


def _root() -> ProcessId | None:
    """Root process: vLLM starts further API servers beside the engine's cores, as children of one
    process."""
    parent = multiprocessing.parent_process()
    pid = os.getpid() if parent is None or parent.pid is None else parent.pid
    return next(iter(process_ids([pid])), None)


_reporter: PulseReporter | None = None
_reporter_lock = threading.Lock()


def process_reporter(
    shape: Callable[[], EngineShape] = EngineShape,
) -> PulseReporter | None:
    """The one reporter of this process, with the `shape` of the first caller.

    vLLM makes its statistics loggers, which know the shape, before its middleware. None outside a
    production engine of a slot.
    """
    global _reporter
    with _reporter_lock:
        if _reporter is None:
            environment = slot_environment()
            if environment is None or environment.role is not Role.PRODUCTION:
                return None
            _reporter = PulseReporter(environment, shape)
        return _reporter
