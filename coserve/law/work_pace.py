"""Paces guest work that is no engine step: decoding or writing a version, waking weights, starting.

The work is done in pieces; each piece needs slack for the time that pieces of its kind have taken,
as a step does. Without slack it waits; but a version may be late and never stuck, so after a while
one piece goes without slack. Touches no clock and no page.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coserve.law.engine_terms import terms_of
from coserve.law.laws import step_budget_s
from coserve.law.slack import hung, slack_s
from harvester.contracts.page import Grant, GrantMode, PulseHead, Reading

SHARE = 0.05
"""Share of time for pieces without slack: the default epsilon by which production's times may grow.
A version takes at most twenty times as long as alone, whatever production does."""
_SLOWER_GAIN = 0.2


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

    def admits(self, budget_s: float, *, now: float) -> bool:
        """Whether a piece may run now; call again after a refusal."""
        if self._admitted_s is None:
            self._admitted_s, self._next_s = now, now + self.piece_s / SHARE
        if self.piece_s > budget_s and now < self._next_s:
            return False
        self._admitted_s, self._next_s = now, now + self.piece_s / SHARE
        return True

    def observe(self, taken_s: float) -> None:
        """Learn the duration of the piece that was admitted last."""
        self.piece_s = max(taken_s, self.piece_s + _SLOWER_GAIN * (taken_s - self.piece_s))
        if self._admitted_s is not None:
            # By its actual duration: a long piece makes the prediction cautious, and delays only
            # itself.
            self._next_s = self._admitted_s + taken_s / SHARE
