"""Asks a slot's pages before each piece of guest work that is no engine step.

One in each working process, workers included: it reads pages and writes none. Imports nothing of
vLLM.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import thread_time

from coserve.law.work_pace import WorkPace, work_budget_s
from harvester.contracts.clock import Clock, MonotonicClock, monotonic_ns
from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.page import Grant, PageDirectory, PageReader, PulseHead, Reading

_LOOK_S = 0.005


class WorkGate:
    """Thread-safe; pieces of several threads wait one after the other."""

    def __init__(
        self, pages: PageDirectory, *, on_host: bool = False, clock: Clock | None = None
    ) -> None:
        """With `on_host` a piece costs the CPU time of its threads, else its wall time, since the
        accelerator is occupied meanwhile."""
        self._pages = pages
        self._grant_page = pages.grant_reader()
        self._guest_page = pages.guest_reader()
        self._pulse_names: tuple[str, ...] = ()
        self._pulse_pages: list[PageReader[PulseHead]] = []
        self._clock = clock or MonotonicClock()
        self._cost_s: Callable[[], float] = thread_time if on_host else self._clock.now
        self._paces: dict[str, WorkPace] = {}
        self._turn = threading.Lock()
        self._hurried = 0

    @contextmanager
    def piece(self, kind: str = "weights") -> Iterator[None]:
        """Waits until a piece of work may run, and learns how long those of its kind take."""
        with self._turn:
            while not (self._hurried or self.admits(kind)):
                time.sleep(_LOOK_S)
        with self.measured(kind):
            yield

    def admits(self, kind: str) -> bool:
        """Whether a piece may run now, for callers that can return later."""
        return self._pace(kind).admits(self.budget_s(), now=self._clock.now())

    @contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        began_s = self._cost_s()
        try:
            yield
        finally:
            self._pace(kind).observe(self._cost_s() - began_s)

    def expect(self, kind: str, piece_s: float) -> None:
        """Before the first piece of a kind was measured."""
        self._paces.setdefault(kind, WorkPace(piece_s))

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Context in which no piece waits, because a caller waits for all of them."""
        self._hurried += 1
        try:
            yield
        finally:
            self._hurried -= 1

    def budget_s(self) -> float:
        """See `work_budget_s`. Infinite while production waits for memory: a guest that can free
        memory only after its work must finish soon, and the agent has lifted it."""
        now_ns = monotonic_ns()
        grant = self._grant_page.read(now_ns=now_ns)
        if grant.record is None:
            return -math.inf
        if self._owes(grant.record, now_ns):
            return math.inf
        return work_budget_s(grant, self._read_pulses(grant.record, now_ns), now_ns=now_ns)

    def _pace(self, kind: str) -> WorkPace:
        return self._paces.setdefault(kind, WorkPace())

    def _owes(self, grant: Grant, now_ns: int) -> bool:
        guest = self._guest_page.read(now_ns=now_ns).record
        if guest is None or not grant.kv_budget_tokens:
            return False
        return guest.kv_tokens_total - guest.kv_tokens_withheld > grant.kv_budget_tokens

    def _read_pulses(self, grant: Grant, now_ns: int) -> list[Reading[PulseHead]]:
        if self._pulse_names != grant.pulses:
            for page in self._pulse_pages:
                page.close()
            self._pulse_names, self._pulse_pages = grant.pulses, []
            # Without them nothing is known, and the gate of the steps says so in the log.
            with suppress(PeerProtocolError):
                self._pulse_pages = [self._pages.pulse_head_reader(name) for name in grant.pulses]
        return [page.read(now_ns=now_ns) for page in self._pulse_pages]
