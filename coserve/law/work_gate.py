"""Paces guest work outside engine steps: decoding or writing a version, waking weights, starting.

The work is done in pieces; each piece needs slack for the time that pieces of its kind have taken,
as a step does. Without slack it waits; but a version may be late and never stuck, so after a while
one piece goes without slack. None goes under a withheld grant: in a slice that measures production
alone, and under an order or verdict against the guest.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import thread_time

from coserve.law.engine_terms import terms_of
from coserve.law.granted_pulses import GrantedPulses
from coserve.law.phantom import step_budget_s
from coserve.law.slack import hung, slack_s
from harvester.contracts.clock import Clock, MonotonicClock, monotonic_ns
from harvester.contracts.page import Grant, GrantMode, PageDirectory, PulseHead, Reading

SHARE = 0.05
"""Share of time for pieces without slack: the default epsilon by which production's times may grow.
A version takes at most twenty times as long as alone, whatever production does."""
_SLOWER_GAIN = 0.2
_LOOK_S = 0.005


def work_budget_s(
    grant: Reading[Grant], pulses: Sequence[Reading[PulseHead]], *, now_ns: int
) -> float:
    """Seconds that a piece of work may take now. An open or closed `grant` names the pulses.

    Minus infinity if production's state is unknown, or if it hangs.
    """
    record = grant.record
    if record is None:
        return -math.inf
    if record.mode is GrantMode.UNGATED:
        return math.inf
    present = [reading.record for reading in pulses if reading.record is not None]
    if not present or len(present) != len(record.pulses):
        return -math.inf
    terms = terms_of(present, record)
    for pulse, of_engine in zip(present, terms, strict=True):
        if hung(pulse, of_engine, now_ns=now_ns):
            return -math.inf
    return step_budget_s(slack_s(present, record, terms, now_ns=now_ns), record)


@dataclass(slots=True)
class WorkPace:
    """Pace of one kind of pieces."""

    piece_s: float = 0.001
    """Predicted duration of a piece; rises at once, falls slowly."""
    _admitted_s: float | None = None
    _next_s: float = 0.0
    """Earliest time of a piece without slack."""

    def admits(self, budget_s: float | None, *, now: float) -> bool:
        """Whether a piece may run now; a refused caller asks again. `budget_s` None admits none."""
        if self._admitted_s is None:
            self._admitted_s, self._next_s = now, now + self.piece_s / SHARE
        if budget_s is None or (self.piece_s > budget_s and now < self._next_s):
            return False
        self._admitted_s, self._next_s = now, now + self.piece_s / SHARE
        return True

    def observe(self, taken_s: float) -> None:
        """Learn the duration of the piece that was admitted last."""
        self.piece_s = max(taken_s, self.piece_s + _SLOWER_GAIN * (taken_s - self.piece_s))
        if self._admitted_s is not None:
            # The actual duration counts here: after a long piece the prediction stays high, which
            # would delay several pieces.
            self._next_s = self._admitted_s + taken_s / SHARE


class WorkGate:
    """Asks a slot's pages before each piece; one in each working process, workers included.

    Thread-safe; pieces of several threads wait in turn, and fit into the slack together.
    """

    def __init__(
        self, pages: PageDirectory, *, on_host: bool = False, clock: Clock | None = None
    ) -> None:
        """`on_host`: a piece costs the CPU time of its threads; else its wall time, since the
        accelerator is occupied meanwhile."""
        self._grant_page = pages.grant_reader()
        self._guest_page = pages.guest_reader()
        self._pulses = GrantedPulses(pages)
        self._clock = clock or MonotonicClock()
        self._cost_s: Callable[[], float] = thread_time if on_host else self._clock.now
        self._paces: dict[str, WorkPace] = {}
        self._turn, self._ended = threading.Lock(), threading.Event()
        self._running_s: list[float] = []
        """Predicted durations of the pieces under way."""
        self._hurried = 0

    @contextmanager
    def piece(self, kind: str = "weights") -> Iterator[None]:
        """Waits until a piece of work may run, and learns how long pieces of its kind take."""
        with ExitStack() as running:
            with self._turn:
                while not (self._hurried or self.admits(kind)):
                    self._ended.wait(_LOOK_S)
                    self._ended.clear()
                running.enter_context(self.measured(kind))
            yield

    def admits(self, kind: str) -> bool:
        """Whether a piece may run now, for callers that can return later."""
        budget_s = self.budget_s()
        if budget_s is not None:
            budget_s -= sum(tuple(self._running_s))
        return self._pace(kind).admits(budget_s, now=self._clock.now())

    @contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        began_s, predicted_s = self._cost_s(), self._pace(kind).piece_s
        self._running_s.append(predicted_s)
        try:
            yield
        finally:
            self._pace(kind).observe(self._cost_s() - began_s)
            self._running_s.remove(predicted_s)
            self._ended.set()

    def expect(self, kind: str, piece_s: float) -> None:
        """Sets the expected duration of a kind's pieces until the first one is measured."""
        self._paces.setdefault(kind, WorkPace(piece_s))

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Context in which no piece waits, because a caller waits for all of them."""
        self._hurried += 1
        try:
            yield
        finally:
            self._hurried -= 1

    def budget_s(self) -> float | None:
        """`work_budget_s` of the present pages; None if withheld: no piece may run.

        Infinite while production waits for memory: a guest that can free memory only after its work
        must finish soon, and the agent has lifted it.
        """
        now_ns = monotonic_ns()
        grant = self._grant_page.read(now_ns=now_ns)
        if grant.record is None:
            return -math.inf
        if self._owes(grant.record, now_ns):
            return math.inf
        if grant.record.withheld:
            return None
        pulses = self._pulses.read(grant.record, now_ns=now_ns)
        return work_budget_s(grant, pulses, now_ns=now_ns)

    def _pace(self, kind: str) -> WorkPace:
        return self._paces.setdefault(kind, WorkPace())

    def _owes(self, grant: Grant, now_ns: int) -> bool:
        guest = self._guest_page.read(now_ns=now_ns).record
        if guest is None or not grant.kv_budget_tokens:
            return False
        return guest.kv_tokens_total - guest.kv_tokens_withheld > grant.kv_budget_tokens
