"""When a guest's work that is no step may go on: a version that is decoded or written, weights that
are woken, a start.

Done in pieces, each asks for slack as a step does, in the time that pieces of this kind have taken.
Where there is none it waits; but a version must be late and never stuck, so after a while one piece
goes all the same. Touches no clock and no page.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coserve.law.engine_terms import terms_of
from coserve.law.laws import step_budget_s
from coserve.law.slack import hung, slack_s
from harvester.contracts.page import Grant, GrantMode, PulseHead, Reading

SHARE = 0.05
"""Share of time for pieces without slack: the epsilon by which production's times
may grow unless an operator says otherwise. Whatever production does, a version takes at most twenty
times as long as alone."""
_SLOWER_GAIN = 0.2


def work_budget_s(
    grant: Reading[Grant], pulses: Sequence[Reading[PulseHead]], *, now_ns: int
) -> float:
    """How long a piece of work may take now. `grant`: open or closed, it names the pulses.

    Minus infinity where production is not known, or hangs.
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
    """Pieces of one kind."""

    piece_s: float = 0.001
    """Predicted: longer at once when a piece was, shorter slowly."""
    _admitted_s: float | None = None
    _next_s: float = 0.0
    """When a piece may go without slack."""

    def admits(self, budget_s: float, *, now: float) -> bool:
        """Whether a piece may run now; asked again after each refusal."""
        if self._admitted_s is None:
            self._admitted_s, self._next_s = now, now + self.piece_s / SHARE
        if self.piece_s > budget_s and now < self._next_s:
            return False
        self._admitted_s, self._next_s = now, now + self.piece_s / SHARE
        return True

    def observe(self, taken_s: float) -> None:
        """Learns the time of the piece that was admitted last."""
        self.piece_s = max(taken_s, self.piece_s + _SLOWER_GAIN * (taken_s - self.piece_s))
        if self._admitted_s is not None:
            # By what it took: one long piece makes the fit cautious and no more than itself late.
            self._next_s = self._admitted_s + taken_s / SHARE
